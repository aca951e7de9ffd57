"""`paged_attention.py` on GPUs: pages with the heads first, as the kernel wants them.

Tokens that are decoded, and guesses, are read by Pallas' kernel, which follows the tables and
takes no copy. Where that does not fit, as in windows, and for prompts, keys and values are
gathered and cuDNN or XLA attends to them.

Shapes: as in `paged_attention.py`, but a layer's pool is [K, P, C, H] of floats as they are: GPUs
scatter into any. R = B * T queries.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange, repeat
from jax import lax
from jax.typing import DTypeLike

from jaxdist.ops.attention import attention_mask, cudnn_takes, masked_attention
from jaxdist.ops.paged_attention import Pages, Rows, token_places

FEW = 17  # queries of a row up to which the kernel reads its pages once for each
WIDTHS = (32, 128, 512, 2048)  # of tables of which copies are made, besides the whole
_KEYS = 64  # that the kernel looks at together: both fit into any GPU's shared memory
_SPLITS = 16  # of a row's pages, worked on side by side


def write_pages(
    pages: Pages, k_BTKH: jax.Array, v_BTKH: jax.Array, rows: Rows, *, dtype: DTypeLike
) -> Pages:
    """As `paged_attention.write_pages`."""
    page_BT, offset_BT = token_places(rows, k_BTKH.shape[1], pages.keys.shape[2])

    def put(pool: jax.Array, new: jax.Array) -> jax.Array:
        new_KBTH = rearrange(new, "b t k h -> k b t h")
        new_KBTH = jnp.where(jnp.isfinite(new_KBTH), new_KBTH, 0).astype(dtype)
        return pool.at[:, page_BT, offset_BT].set(new_KBTH, mode="promise_in_bounds")

    return Pages(put(pages.keys, k_BTKH), put(pages.values, v_BTKH))


def paged_attention(
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
    """As `paged_attention.paged_attention`; `dtype` is the pool's."""
    assert pages.keys.dtype == dtype
    if sliding_window is None or sliding_window >= rows.tables.shape[1] * pages.keys.shape[2]:
        sliding_window = is_local = None
    if scale is None:
        scale = float(q_BTNH.shape[-1] ** -0.5)
    scores = {"scale": scale, "softcap": softcap}

    def in_window(q_BTNH: jax.Array, pages: Pages) -> jax.Array:
        return gathered_attention(q_BTNH, pages, rows, sliding_window=sliding_window, **scores)

    def of_all(q_BTNH: jax.Array, pages: Pages) -> jax.Array:
        if _kernel_takes(q_BTNH, pages):
            return kernel_attention(q_BTNH, pages, rows, **scores)
        return gathered_attention(q_BTNH, pages, rows, sliding_window=None, **scores)

    if isinstance(is_local, jax.Array):
        return lax.cond(is_local, in_window, of_all, q_BTNH, pages)
    is_local = sliding_window is not None and is_local is not False
    return (in_window if is_local else of_all)(q_BTNH, pages)


def kernel_attention(
    q_BTNH: jax.Array,
    pages: Pages,
    rows: Rows,
    *,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> jax.Array:
    """Each query as a row of the kernel, which sees the keys up to its own."""
    from jax.experimental.pallas.ops.gpu import paged_attention as pallas

    length, width, page_size = q_BTNH.shape[1], rows.tables.shape[1], pages.keys.shape[2]
    together = _KEYS // page_size
    splits = min(_SPLITS, -(-width // together))
    tables = jnp.pad(rows.tables, ((0, 0), (0, -width % (together * splits))))
    seen_BT = rows.positions[:, None] + jnp.arange(1, length + 1)[None, :]
    # Of filler the kernel makes zeros, and reads nothing.
    seen_BT = jnp.where(rows.counts[:, None] > 0, seen_BT, 0)
    q_RNH = rearrange(q_BTNH, "b t n h -> (b t) n h").astype(jnp.float32) * scale
    out_RNH = pallas.paged_attention(
        q_RNH.astype(q_BTNH.dtype),
        pages.keys,
        pages.values,
        repeat(tables, "b w -> (b t) w", t=length),
        seen_BT.reshape(-1).astype(jnp.int32),
        pages_per_compute_block=together,
        k_splits=splits,
        num_warps=4,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    return rearrange(out_RNH, "(b t) n h -> b t n h", t=length)


def gathered_attention(q_BTNH: jax.Array, pages: Pages, rows: Rows, **scores: Any) -> jax.Array:
    """With a copy of the rows' pages, no wider than the longest row needs.

    scores: sliding_window, scale and softcap of `paged_attention`, all of them.
    """
    width, page_size = rows.tables.shape[1], pages.keys.shape[2]
    widths = [w for w in WIDTHS if w < width]
    used = (jnp.max(rows.positions + rows.counts) - 1) // page_size + 1
    branches = [
        partial(_gathered, rows=rows._replace(tables=rows.tables[:, :w]), **scores)
        for w in (*widths, width)
    ]
    if not widths:
        return branches[0](q_BTNH, pages)
    return lax.switch(sum(used > w for w in widths), branches, q_BTNH, pages)


def _gathered(
    q_BTNH: jax.Array,
    pages: Pages,
    *,
    rows: Rows,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    length, page_size = q_BTNH.shape[1], pages.keys.shape[2]
    tables, first_B = rows.tables, jnp.zeros_like(rows.positions)
    if sliding_window is not None:  # only the pages that it reaches
        span = sliding_window + length - 1  # keys that a row's queries see
        count = min(tables.shape[1], (span + page_size - 2) // page_size + 1)
        first_B = (rows.positions - sliding_window + 1) // page_size
        first_B = jnp.clip(first_B, 0, tables.shape[1] - count)
        columns = first_B[:, None] + jnp.arange(count)[None, :]
        tables = jnp.take_along_axis(tables, columns, axis=1)
    k_BSKH, v_BSKH = (rearrange(pool[:, tables], "k b w c h -> b (w c) k h") for pool in pages)
    # Filler looks from where the last token stands: it always sees something.
    last_B1 = jnp.maximum(rows.counts - 1, 0)[:, None]
    query_BT = rows.positions[:, None] + jnp.minimum(jnp.arange(length)[None, :], last_B1)
    key_BS = page_size * first_B[:, None] + jnp.arange(k_BSKH.shape[1])[None, :]
    seen_BTS = attention_mask(query_BT, key_BS, sliding_window=sliding_window)
    if softcap is not None or not _is_plain(q_BTNH, pages):
        return masked_attention(q_BTNH, k_BSKH, v_BSKH, seen_BTS, scale=scale, softcap=softcap)
    return jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=seen_BTS[:, None],
        scale=scale,
        implementation="cudnn" if cudnn_takes(q_BTNH, v_BSKH) else "xla",
    )


def _kernel_takes(q_BTNH: jax.Array, pages: Pages) -> bool:
    """Whether the kernel runs it: Triton's blocks are powers of two, of at least 16 by 16."""
    page_size, head_dim = pages.keys.shape[2:]
    powers = all(size & (size - 1) == 0 for size in (page_size, head_dim))
    fits = powers and page_size <= _KEYS and 16 <= head_dim <= 256
    return fits and q_BTNH.shape[1] <= FEW and _is_plain(q_BTNH, pages)


def _is_plain(q_BTNH: jax.Array, pages: Pages) -> bool:
    """16-bit floats of one width: fp32 is for exact results, and tensor cores would round it."""
    same = q_BTNH.dtype == pages.keys.dtype and pages.keys.shape == pages.values.shape
    return same and q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
