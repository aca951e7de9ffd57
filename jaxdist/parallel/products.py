"""Products with weights that tp shards, each with as few sums over tp as there can be.

The residual stream is whole on every member of tp, or sharded over its sequence. Products that
leave it (q, k and v; gate and up) have sharded outputs, so only their backward pass needs a sum,
and one serves all of them, because a member first adds its own parts. Products that join it (o;
down) have sharded inputs and are summed on the way forward. That is two sums forward and two
backward in each layer (Megatron-LM, arXiv 1909.08053), of the compute dtype. Left to the
partitioner, each product of the backward pass is summed on its own.

Where the sequence is sharded, each sum is a reduce-scatter, and leaving the stream an all-gather,
which the backward pass repeats so that nothing whole has to be kept (arXiv 2205.05198).

Shapes: B batch rows, T tokens, D hidden size, F features (heads or MLP) that tp shards.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.dot import dot
from jaxdist.parallel.collectives import sum_into, vary

_WHOLE = P(None, None, None)  # of [B, T, D], or of [B, T, F] where the weight is not sharded
_SHARDED = P(None, None, "tp")  # of [B, T, F]
_COLUMNS, _ROWS = P(None, "tp"), P("tp", None)  # of weights [D, F] and [F, D]


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def expand(
    x_BTD: Array,
    weights: tuple[Array, ...],
    sharded: tuple[bool, ...],
    residual: P,
    compute_dtype: DTypeLike,
) -> tuple[Array, ...]:
    """x @ w for several w [D, F], whose F is over tp where `sharded` says so (at least once).

    `residual` is the tp sharding of x. Returns one [B, T, F] for each weight.
    """
    whole_BTD = lax.with_sharding_constraint(x_BTD, _WHOLE)
    return tuple(
        lax.with_sharding_constraint(
            dot(whole_BTD, w, compute_dtype), _SHARDED if split else _WHOLE
        )
        for w, split in zip(weights, sharded, strict=True)
    )


def _expand_forward(
    x_BTD: Array, weights: tuple[Array, ...], *static: Any
) -> tuple[tuple[Array, ...], tuple[Array, tuple[Array, ...]]]:
    return expand(x_BTD, weights, *static), (x_BTD, weights)


def _expand_backward(
    sharded: tuple[bool, ...],
    residual: P,
    compute_dtype: DTypeLike,
    kept: tuple[Array, tuple[Array, ...]],
    cotangents: tuple[Array, ...],
) -> tuple[Array, tuple[Array, ...]]:
    x_BTD, weights = kept
    pairs = list(zip(weights, cotangents, strict=True))
    split = [place for place, is_sharded in enumerate(sharded) if is_sharded]
    alike = [place for place, is_sharded in enumerate(sharded) if not is_sharded]

    def own_inputs(pairs: list[tuple[Array, Array]]) -> Array:
        # These gradients do not depend on what x is.
        x_BTD = vary(jnp.zeros(whole_BTD.shape, whole_BTD.dtype), (*outside, "tp"))
        return sum_into(residual, rounded_sum(pull_all(x_BTD, pairs, compute_dtype)[0]), ("tp",))

    def own_weights(whole_BTD: Array, pairs: list[tuple[Array, Array]]) -> list[Array]:
        return pull_all(vary(whole_BTD, ("tp",)), pairs, compute_dtype)[1]

    # Two regions, so that a schedule may make the weight gradients later (`split.py`).
    whole_BTD = lax.with_sharding_constraint(x_BTD, _WHOLE)
    outside = tuple(jax.typeof(whole_BTD).manual_axis_type.varying)
    own_pairs = [pairs[place] for place in split]
    specs = [(_COLUMNS, _SHARDED)] * len(split)
    over_tp = partial(jax.shard_map, axis_names={"tp"})
    dx_BTD = over_tp(own_inputs, in_specs=(specs,), out_specs=residual)(own_pairs)
    split_dws = over_tp(own_weights, in_specs=(_WHOLE, specs), out_specs=[_COLUMNS] * len(split))(
        whole_BTD, own_pairs
    )
    # A weight that every member holds whole gives each of them the same, which counts once.
    dxs, alike_dws = pull_all(whole_BTD, [pairs[place] for place in alike], compute_dtype)
    dxs = [lax.with_sharding_constraint(dx, residual) for dx in dxs]
    dws = dict(zip(split + alike, split_dws + alike_dws, strict=True))
    return rounded_sum([dx_BTD, *dxs]), tuple(dws[place] for place in range(len(weights)))


expand.defvjp(_expand_forward, _expand_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def contract(x_BTF: Array, w_FD: Array, residual: P, compute_dtype: DTypeLike) -> Array:
    """x @ w with F over tp: [B, T, D], which tp shards by `residual`."""

    def own_rows(x_BTF: Array, w_FD: Array) -> Array:
        return sum_into(residual, dot(x_BTF, w_FD, compute_dtype), ("tp",))

    return jax.shard_map(
        own_rows, axis_names={"tp"}, in_specs=(_SHARDED, _ROWS), out_specs=residual
    )(x_BTF, w_FD)


def _contract_forward(x_BTF: Array, w_FD: Array, *static: Any) -> tuple[Array, tuple[Array, Array]]:
    return contract(x_BTF, w_FD, *static), (x_BTF, w_FD)


def _contract_backward(
    residual: P, compute_dtype: DTypeLike, kept: tuple[Array, Array], cotangent_BTD: Array
) -> tuple[Array, Array]:
    x_BTF, w_FD = kept
    whole_BTD = lax.with_sharding_constraint(cotangent_BTD, _WHOLE)
    (dx_BTF,), (dw_FD,) = pull_all(x_BTF, [(w_FD, whole_BTD)], compute_dtype)
    return lax.with_sharding_constraint(dx_BTF, _SHARDED), dw_FD


contract.defvjp(_contract_forward, _contract_backward)


def pull_all(
    x: Array, pairs: Sequence[tuple[Array, Array]], compute_dtype: DTypeLike
) -> tuple[list[Array], list[Array]]:
    """Gradients of dot(x, w) by x and by w, for each pair of a weight and a cotangent."""
    dxs, dws = [], []
    for w, cotangent in pairs:
        dx, dw = jax.vjp(lambda x, w: dot(x, w, compute_dtype), x, w)[1](cotangent)
        dxs.append(dx)
        dws.append(dw)
    return dxs, dws


def rounded_sum(parts: Sequence[Array]) -> Array:
    """Their sum, rounded to their dtype once."""
    total = sum(part.astype(jnp.float32) for part in parts[1:]) + parts[0].astype(jnp.float32)
    return total.astype(parts[0].dtype)
