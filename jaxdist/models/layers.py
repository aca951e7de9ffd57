"""What every layer is made of: the Context handed down the model, weights, Linear and the norms.

Shapes: B batch rows, T tokens, S keys, D hidden size, N query heads, K key/value heads, H head dim.

Modules are plain pytrees: their leaves are the arrays inside `nnx.Param`, whose `axes` metadata
names each dim's logical axis. Everything else on a Module is static and hashable.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxdist.ops.experts import routed_experts
from jaxdist.ops.norm import layer_norm, rms_norm

Axes = tuple[str, ...]
Cache = Any  # whatever `attend` keeps for one layer; None in training


def unconstrained(x: jax.Array, logical_axes: Axes) -> jax.Array:
    """The `constrain` of a model on one device: no sharding to ask for."""
    return x


@dataclass(frozen=True, kw_only=True)
class Context:
    """How the model computes, decided by its caller: training, pipelining, decoding."""

    dot: Callable[[jax.Array, jax.Array], jax.Array]  # x [..., I], w [I, O] -> [..., O]
    dots: Callable[[jax.Array, Sequence[jax.Array], Axes], Sequence[jax.Array]] | None = None
    # ^ dot of one x with several w, told the logical axis of each O; None: one by one
    attend: Callable[..., tuple[jax.Array, Cache]]
    # ^ q [B, T, N, H], k [B, T, K, H], v [B, T, K, H], cache -> out [B, T, N, H], cache; with the
    #   model's `scores` as keywords where it has any (see `Attention`)
    experts: Callable[..., jax.Array] = routed_experts
    # ^ as ops.experts.routed_experts, wherever the experts are
    all_experts: Callable[..., jax.Array] | None = None
    # ^ the same of x, weights, chosen, shares and the (gate, up, down) [I, O] of an MLP that every
    #   token takes: the sum of both; None: the one, then the other
    head: Callable[[jax.Array, jax.Array], jax.Array] | None = None
    # ^ x [..., D], table [V, D] -> logits [..., V] in fp32; None: their product
    constrain: Callable[[jax.Array, Axes], jax.Array] = unconstrained
    compute_dtype: DTypeLike  # of activations


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PerLayer:
    """A stack as one weight a layer, in the Param of a model whose layers store theirs unlike."""

    layers: tuple[Any, ...]


def is_per_layer(node: Any) -> bool:
    """Whether it is such a stack."""
    return isinstance(node, PerLayer)


@dataclass(frozen=True, kw_only=True)
class Initializer:
    """Hugging Face's: weights normal(0, std), biases zero, norm gains one."""

    std: float
    dtype: DTypeLike

    def normal(self, key: jax.Array, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        return nnx.Param(self.std * jax.random.normal(key, shape, self.dtype), axes=axes)

    def zeros(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        return nnx.Param(jnp.zeros(shape, self.dtype), axes=axes)

    def ones(self, shape: tuple[int, ...], axes: Axes) -> nnx.Param:
        return nnx.Param(jnp.ones(shape, self.dtype), axes=axes)


class Linear(nnx.Module):
    """x @ weight + bias; weight [in, out] (the transpose of torch's), bias [out] or None."""

    def __init__(
        self, sizes: tuple[int, int], axes: Axes, bias: bool, *, key: jax.Array, init: Initializer
    ):
        self.weight = init.normal(key, sizes, axes)
        self.bias = init.zeros(sizes[1:], axes[1:]) if bias else None
        self.out_axis = axes[-1]

    def __call__(self, x: jax.Array, ctx: Context) -> jax.Array:
        return self._with_bias(ctx.dot(x, self.weight[...]))

    @staticmethod
    def fan_out(linears: Sequence["Linear"], x: jax.Array, ctx: Context) -> list[jax.Array]:
        """Each of `linears` on the same x, in one go where the context knows how."""
        weights = [linear.weight[...] for linear in linears]
        if ctx.dots is None:
            outs = [ctx.dot(x, weight) for weight in weights]
        else:
            outs = ctx.dots(x, weights, tuple(linear.out_axis for linear in linears))
        return [linear._with_bias(out) for linear, out in zip(linears, outs, strict=True)]

    def _with_bias(self, out: jax.Array) -> jax.Array:
        if self.bias is None:
            return out
        # Added in the master's dtype, so that the bias gradient is summed in it.
        bias = jnp.expand_dims(self.bias[...], tuple(range(out.ndim - 1)))
        return (out + bias).astype(out.dtype)


class RMSNorm(nnx.Module):
    """Gain [size] over the last dim, fp32 statistics."""

    def __init__(self, size: int, eps: float, *, init: Initializer, axis: str = "norm"):
        self.weight = init.ones((size,), (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], self.eps)


class RMSNorm1p(nnx.Module):
    """RMSNorm whose gain is 1 + weight [size]; the sum is fp32."""

    def __init__(self, size: int, eps: float, *, init: Initializer, axis: str = "norm"):
        self.weight = init.zeros((size,), (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, 1.0 + self.weight[...].astype(jnp.float32), self.eps)


class LayerNorm(nnx.Module):
    """Gain and bias [size] over the last dim, fp32 statistics."""

    def __init__(self, size: int, eps: float, *, init: Initializer):
        self.weight = init.ones((size,), ("norm",))
        self.bias = init.zeros((size,), ("norm",))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.weight[...], self.bias[...], self.eps)


NORMS = {"rmsnorm": RMSNorm, "rmsnorm1p": RMSNorm1p, "layernorm": LayerNorm}  # ModelConfig.norm
