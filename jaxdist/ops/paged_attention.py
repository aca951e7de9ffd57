"""Attention over keys and values that lie in pages, and the writing of new ones.

Shapes: B rows, T queries of a row, W pages of a row's table, P pages of the pool, C tokens a page,
S = W * C keys of a row, N query heads, K key/value heads (N = K * G), H head dim, that of the
values perhaps another.

A pool holds 16-bit floats as their bits (see `parallel/stacks.py`): XLA:CPU would scatter into
bf16 by way of fp32, a copy of the whole pool. Page 0 belongs to nobody: padding writes there.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.ops.attention import attention_mask, masked_attention


class Pages(NamedTuple):
    """One layer's pool."""

    keys: jax.Array  # [P, C, K, H]
    values: jax.Array  # [P, C, K, H]


class Rows(NamedTuple):
    """Where a step's rows stand in their sequences."""

    positions: jax.Array  # [B] of the first query
    counts: jax.Array  # [B] queries that are no padding
    tables: jax.Array  # [B, W] pages


def write_pages(
    pages: Pages, k_BTKH: jax.Array, v_BTKH: jax.Array, rows: Rows, *, dtype: DTypeLike
) -> Pages:
    """`pages` with the keys and values of the rows' queries, in `dtype`.

    What is not finite becomes zero: a page outlives its sequence, and even a weight of zero would
    spread it.
    """
    page_BT, offset_BT = _places(rows, k_BTKH.shape[1], pages.keys.shape[1])

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        new = jnp.where(jnp.isfinite(new), new, 0).astype(dtype)
        if pool.dtype != new.dtype:
            new = jax.lax.bitcast_convert_type(new, pool.dtype)
        return pool.at[page_BT, offset_BT].set(new, mode="promise_in_bounds")

    return Pages(put(pages.keys, k_BTKH), put(pages.values, v_BTKH))


def reference_paged_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    *,
    dtype: DTypeLike,
    sliding_window: int | None = None,
    is_local: bool | jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """The plain way: all pages of every row gathered, one masked softmax; [B, T, N, Hv].

    The arguments are those of `causal_attention`.
    """
    k_BSKH, v_BSKH = (
        _floats(pool, dtype)[rows.tables].reshape(q_BTNH.shape[0], -1, *pool.shape[2:])
        for pool in pages
    )
    query_BT = rows.positions[:, None] + jnp.arange(q_BTNH.shape[1])[None, :]
    key_1S = jnp.arange(k_BSKH.shape[1])[None, :]
    seen_BTS = attention_mask(query_BT, key_1S, sliding_window=sliding_window, is_local=is_local)
    return masked_attention(q_BTNH, k_BSKH, v_BSKH, seen_BTS, scale=scale, softcap=softcap)


def _places(rows: Rows, num_queries: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each query, [B, T]; padding goes to page 0."""
    index_BT = jnp.arange(num_queries)[None, :]
    position_BT = rows.positions[:, None] + index_BT
    column_BT = jnp.minimum(position_BT // page_size, rows.tables.shape[1] - 1)
    page_BT = jnp.take_along_axis(rows.tables, column_BT, axis=1)
    page_BT = jnp.where(index_BT < rows.counts[:, None], page_BT, 0)
    return page_BT, position_BT % page_size


def _floats(pool: jax.Array, dtype: DTypeLike) -> jax.Array:
    return pool if pool.dtype == dtype else jax.lax.bitcast_convert_type(pool, dtype)
