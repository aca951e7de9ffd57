"""Attention over keys and values that lie in pages, and the writing of new ones.

Shapes: B rows, T queries of a row, W pages of a row's table, P pages of the pool, C tokens a page,
S = W * C keys of a row, N query heads, K key/value heads (N = K * G), H head dim, that of the
values perhaps another.

A pool holds 16-bit floats as their bits (see `ops/stacks.py`): XLA:CPU would scatter into
bf16 by way of fp32, a copy of the whole pool. Page 0 belongs to nobody: padding writes there.

A page of keys lies by token or, for CPUs, by column: their product with the queries takes keys
[H, S] as they are, and would turn [S, H] around first, which takes longer than the product.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike

from jaxdist.ops.attention import attention_mask, masked_attention

KeyPage = Literal["c k h", "k h c"]  # by token, by column
CHUNK = 64  # keys looked at together: those of 16 rows, widened, fit into a core's cache
QUERIES = 32  # from how many on a row is worth a loop of its own, which ends where the row does
_FAR = 2**30  # later than every position
_LOWEST = -1e30  # below every score


class Pages(NamedTuple):
    """One layer's pool."""

    keys: jax.Array  # [P, C, K, H], or [P, K, H, C]
    values: jax.Array  # [P, C, K, H]


class Rows(NamedTuple):
    """Where a step's rows stand in their sequences."""

    positions: jax.Array  # [B] of the first query
    counts: jax.Array  # [B] queries that are no padding
    tables: jax.Array  # [B, W] pages


def write_pages(
    pages: Pages,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    rows: Rows,
    *,
    dtype: DTypeLike,
    key_page: KeyPage = "c k h",
) -> Pages:
    """`pages` with the keys and values of the rows' queries, in `dtype`.

    What is not finite becomes zero: a page outlives its sequence, and even a weight of zero would
    spread it.
    """
    page_BT, offset_BT = token_places(rows, k_BTKH.shape[1], pages.values.shape[1])
    by_token = (page_BT, offset_BT)
    by_column = (page_BT, slice(None), slice(None), offset_BT)

    def put(pool: jax.Array, place: tuple[Any, ...], new: jax.Array) -> jax.Array:
        new = jnp.where(jnp.isfinite(new), new, 0).astype(dtype)
        if pool.dtype != new.dtype:
            new = lax.bitcast_convert_type(new, pool.dtype)
        return pool.at[place].set(new, mode="promise_in_bounds")

    keys = put(pages.keys, by_token if key_page == "c k h" else by_column, k_BTKH)
    return Pages(keys, put(pages.values, by_token, v_BTKH))


def paged_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    *,
    dtype: DTypeLike,
    key_page: KeyPage = "c k h",
    sliding_window: int | None = None,
    is_local: bool | jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`reference_paged_attention`, some keys at a time and no further than the rows go.

    The softmax is made as it goes, as in FlashAttention (arXiv 2205.14135); fp32 inside. Rows of
    few queries are looked at together, because a small product costs as much to start as to run.
    """
    batch, length, _, head_dim = q_BTNH.shape
    factor = head_dim**-0.5 if scale is None else scale
    width = max(1, CHUNK // pages.values.shape[1])
    tables = jnp.pad(rows.tables, ((0, 0), (0, -rows.tables.shape[1] % width)))
    scaled_BTNH = q_BTNH.astype(jnp.float32) * factor

    def some(given: tuple[jax.Array, Rows]) -> jax.Array:
        return _chunk_by_chunk(
            *given,
            pages,
            width=width,
            dtype=dtype,
            key_page=key_page,
            sliding_window=sliding_window,
            is_local=is_local,
            softcap=softcap,
        )

    given = (scaled_BTNH, rows._replace(tables=tables))
    # The largest power of two of rows that have no more than QUERIES together and divides them.
    together = math.gcd(batch, 1 << max(1, QUERIES // length).bit_length() - 1)
    if together == batch:
        out_BTNH = some(given)
    else:
        cut = jax.tree.map(lambda x: x.reshape(-1, together, *x.shape[1:]), given)
        out_BTNH = lax.map(some, cut).reshape(*q_BTNH.shape[:-1], -1)
    return out_BTNH.astype(q_BTNH.dtype)


def _chunk_by_chunk(
    q_BTNH: jax.Array,
    rows: Rows,
    pages: Pages,
    *,
    width: int,
    dtype: DTypeLike,
    key_page: KeyPage,
    sliding_window: int | None,
    is_local: bool | jax.Array | None,
    softcap: float | None,
) -> jax.Array:
    """Attention of scaled fp32 queries, `width` pages at a time as far as the longest row."""
    batch, length, heads, _ = q_BTNH.shape
    page_size, kv_heads = pages.values.shape[1:3]
    size = width * page_size
    query_BT = rows.positions[:, None] + jnp.arange(length)[None, :]
    q_BKRH = rearrange(q_BTNH, "b t (k g) h -> b k (g t) h", k=kv_heads)
    num_rows = q_BKRH.shape[2]

    def chunk(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> Any:
        most_BKR, sum_BKR, out_BKRH = carry
        table = lax.dynamic_slice_in_dim(rows.tables, index * width, width, axis=1)
        k, v = (_floats(pool[table], dtype).astype(jnp.float32) for pool in pages)
        k_BKHS = rearrange(k, f"b w {key_page} -> b k h (w c)")
        v_BKSH = rearrange(v, "b w c k h -> b k (w c) h")
        score_BKRS = _batched("bkrh,bkhs->bkrs", q_BKRH, k_BKHS)
        if softcap is not None:
            score_BKRS = softcap * jnp.tanh(score_BKRS / softcap)
        key_1S = (index * size + jnp.arange(size))[None, :]
        seen_BTS = attention_mask(
            query_BT, key_1S, sliding_window=sliding_window, is_local=is_local
        )
        seen_BGTS = jnp.broadcast_to(
            seen_BTS[:, None], (batch, heads // kv_heads, *seen_BTS.shape[1:])
        )
        seen_B1RS = seen_BGTS.reshape(batch, 1, num_rows, -1)
        score_BKRS = jnp.where(seen_B1RS, score_BKRS, -jnp.inf)
        higher_BKR = jnp.maximum(most_BKR, score_BKRS.max(axis=-1))
        weight_BKRS = jnp.exp(score_BKRS - higher_BKR[..., None])
        shrink_BKR = jnp.exp(most_BKR - higher_BKR)
        out_BKRH = out_BKRH * shrink_BKR[..., None]
        out_BKRH += _batched("bkrs,bksh->bkrh", weight_BKRS, v_BKSH)
        return higher_BKR, sum_BKR * shrink_BKR + weight_BKRS.sum(axis=-1), out_BKRH

    shape = (batch, kv_heads, num_rows)
    first = 0
    if sliding_window is not None and (is_local is None or is_local is True):
        earliest = jnp.min(jnp.where(rows.counts > 0, rows.positions, _FAR)) - sliding_window + 1
        first = jnp.clip(earliest // size, 0, None)
    ends = jnp.where(rows.counts > 0, rows.positions + rows.counts, 0)
    last = (jnp.max(ends) - 1) // size + 1
    # Finite, so that a chunk of which a row sees nothing gives no NaN; what it adds shrinks to 0.
    start = (jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, pages.values.shape[3])))
    _, sum_BKR, out_BKRH = lax.fori_loop(jnp.minimum(first, last), last, chunk, start)
    out_BKRH = out_BKRH / jnp.maximum(sum_BKR, 1e-30)[..., None]
    return rearrange(out_BKRH, "b k (g t) h -> b t (k g) h", t=length)


def _batched(dims: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(dims, a, b, precision=lax.Precision.HIGHEST)


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


def token_places(rows: Rows, num_queries: int, page_size: int) -> tuple[jax.Array, jax.Array]:
    """Page and offset of each query, [B, T]; padding goes to page 0."""
    index_BT = jnp.arange(num_queries)[None, :]
    position_BT = rows.positions[:, None] + index_BT
    column_BT = jnp.minimum(position_BT // page_size, rows.tables.shape[1] - 1)
    page_BT = jnp.take_along_axis(rows.tables, column_BT, axis=1)
    page_BT = jnp.where(index_BT < rows.counts[:, None], page_BT, 0)
    return page_BT, position_BT % page_size


def _floats(pool: jax.Array, dtype: DTypeLike) -> jax.Array:
    return pool if pool.dtype == dtype else lax.bitcast_convert_type(pool, dtype)
