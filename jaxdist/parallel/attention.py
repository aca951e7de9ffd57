"""Attention by heads: each member of tp attends with its own, nothing is left to the partitioner.

cuDNN's attention brings a partitioner of its own, which knows nothing of manual axes; where all
axes are manual, it is not asked. Pallas' kernels for TPUs have none. Differentiated as one op, so
that autodiff sees no `shard_map`. Kept for the backward pass, under the name attn_out, are the
result and the softmax's statistics; masks are made again.

Shapes: B batch rows, T tokens, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.collectives import vary

# (q, k, v, *extra) -> [B, T, N, H]
Attention = Callable[..., Array]
_HEADS, _STATISTICS = P(None, None, "tp", None), P(None, "tp")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_heads(
    attention: Attention, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, extra: tuple[Any, ...]
) -> Array:
    """`attention(q, k, v, *extra)`, N and K sharded over tp, `extra` (or None) whole everywhere."""
    return _forward(attention, q_BTNH, k_BTKH, v_BTKH, extra)[0]


def _forward(
    attention: Attention, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, extra: tuple[Any, ...]
) -> tuple[Array, tuple[Any, ...]]:
    def own(*arguments: Any) -> tuple[Array, list[Array]]:
        out, closure = _linearize(attention, *arguments)
        return out, closure.statistics

    out_BTNH, statistics = jax.shard_map(
        own,
        axis_names={"tp"},
        in_specs=(_HEADS, _HEADS, _HEADS, P()),
        out_specs=(_HEADS, _STATISTICS),
    )(q_BTNH, k_BTKH, v_BTKH, extra)
    out_BTNH = checkpoint_name(out_BTNH, "attn_out")
    statistics = [checkpoint_name(a, "attn_out") for a in statistics]
    return out_BTNH, (q_BTNH, k_BTKH, v_BTKH, extra, out_BTNH, statistics)


def _backward(
    attention: Attention, kept: tuple[Any, ...], dout_BTNH: Array
) -> tuple[Array, Array, Array, None]:
    def own(
        q: Array, k: Array, v: Array, extra: Any, out: Array, statistics: list[Array], dout: Array
    ) -> tuple[Array, Array, Array]:
        # What the forward computes here is replaced by what was kept, and so never runs.
        return _linearize(attention, q, k, v, extra)[1].pull(out, statistics, dout)

    gradients = jax.shard_map(
        own,
        axis_names={"tp"},
        in_specs=(_HEADS, _HEADS, _HEADS, P(), _HEADS, _STATISTICS, _HEADS),
        out_specs=(_HEADS, _HEADS, _HEADS),
    )(*kept, dout_BTNH)  # pyright: ignore[reportCallIssue]: as many as `_forward` has kept
    return *gradients, None


by_heads.defvjp(_forward, _backward)


class _Closure:
    """A vjp closure of an attention, whose result and statistics may be put in later."""

    def __init__(self, vjp: Any, out: Array, inputs: list[Array]) -> None:
        self.leaves, self.tree = jax.tree.flatten(vjp)
        made = [a for a in self.leaves if all(a is not given for given in inputs)]
        # The only leaves that hold a number a head: anything else is made again where it is used.
        self.outs = [a for a in made if (a.shape, a.dtype) == (out.shape, out.dtype)]
        self.statistics = [a for a in made if self._is_statistic(a, out)]
        if len(self.outs) > 1:
            self.outs = self.statistics = []

    def pull(self, out: Array, statistics: list[Array], dout: Array) -> tuple[Array, Array, Array]:
        """Gradients by q, k and v."""
        kept = {id(a): b for a, b in zip(self.statistics, statistics, strict=True)}
        kept |= {id(a): out for a in self.outs}
        leaves = [kept.get(id(a), a) for a in self.leaves]
        return jax.tree.unflatten(self.tree, leaves)(dout)

    @staticmethod
    def _is_statistic(a: Array, out: Array) -> bool:
        """[B, N, T] or [B, K, N / K, T], fp32."""
        batch, length, heads, _ = out.shape
        fits = a.size == batch * length * heads and a.ndim > 2 and a.shape[0] == batch
        return fits and a.shape[-1] == length and a.dtype == jnp.float32


def _linearize(
    attention: Attention, q: Array, k: Array, v: Array, extra: tuple[Any, ...]
) -> tuple[Array, _Closure]:
    extra = jax.tree.map(lambda a: vary(a, ("tp",)), extra)
    out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, *extra), q, k, v)
    return out, _Closure(vjp, out, [q, k, v, *jax.tree.leaves(extra)])
