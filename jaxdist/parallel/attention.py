"""Attention by heads: each member of tp attends with its own, nothing is left to the partitioner.

cuDNN's attention brings a partitioner of its own, which knows nothing of manual axes; where all
axes are manual, it is not asked. Differentiated as one op, so that autodiff sees no `shard_map`;
the backward pass runs the forward kernel again, whose result and statistics it does not keep.

Shapes: B batch rows, T tokens, N query heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.collectives import vary

# (q, k, v, *extra) -> [B, T, N, H]
Attention = Callable[..., Array]
_HEADS = P(None, None, "tp", None)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_heads(
    attention: Attention, q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, extra: tuple[Any, ...]
) -> Array:
    """`attention(q, k, v, *extra)`, N and K sharded over tp, `extra` (or None) whole everywhere."""

    def own(q: Array, k: Array, v: Array, extra: tuple[Any, ...]) -> Array:
        return attention(q, k, v, *_varying(extra))

    return jax.shard_map(
        own, axis_names={"tp"}, in_specs=(_HEADS, _HEADS, _HEADS, P()), out_specs=_HEADS
    )(q_BTNH, k_BTKH, v_BTKH, extra)


def _forward(attention: Attention, *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    return by_heads(attention, *arguments), arguments


def _backward(
    attention: Attention, kept: tuple[Any, ...], dout_BTNH: Array
) -> tuple[Array, Array, Array, None]:
    def own(q: Array, k: Array, v: Array, extra: tuple[Any, ...], dout: Array) -> Any:
        whole = _varying(extra)
        return jax.vjp(lambda q, k, v: attention(q, k, v, *whole), q, k, v)[1](dout)

    gradients = jax.shard_map(
        own,
        axis_names={"tp"},
        in_specs=(_HEADS, _HEADS, _HEADS, P(), _HEADS),
        out_specs=(_HEADS, _HEADS, _HEADS),
    )(*kept, dout_BTNH)
    return *gradients, None


by_heads.defvjp(_forward, _backward)


def _varying(extra: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda a: vary(a, ("tp",)), extra)
