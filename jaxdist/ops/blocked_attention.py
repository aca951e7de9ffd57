"""Causal attention in blocks of queries, for CPUs: no [T, T] matrix, none of its masked half.

The backward pass makes the weights again from the saved log-sum-exp, as FlashAttention does
(arXiv 2205.14135). Score matrices are multiplied as they lie: only q, k, v and dout, which are
small, are ever transposed.

Shapes: B batch rows, T tokens, N query heads, K key/value heads (N = K * G), G query heads a key
head, H head dim. Of one block: Q queries, R = G * Q rows, C keys.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from einops import rearrange

from jaxdist.ops.product import product
from jaxdist.ops.remade_attention import remade_attention

BLOCK = 128  # queries
MAX_BLOCKS = 32  # each is traced and compiled by itself


def blocked_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    is_local: jax.Array | None,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """`causal_attention` by blocks; [B, T, N, H] in q's dtype.

    A traced `is_local` chooses when it runs: a layer with a window skips the keys before it.
    """
    arrays = q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, is_local
    return remade_attention(_attend, _pull, *arrays, sliding_window, scale, softcap)


def _attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    *,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and the log of the softmax's sum, [B, K, G, T]."""
    kv_heads = k_BTKH.shape[2]
    q_BKGTH = rearrange(q_BTNH, "b t (k g) h -> b k g t h", k=kv_heads)
    k_BKHT = rearrange(k_BTKH, "b t k h -> b k h t")
    v_BKTH = rearrange(v_BTKH, "b t k h -> b k t h")
    outs, lses = [], []
    for queries, keys in _blocks(q_BTNH.shape[1], sliding_window):
        q_BKRH = _rows(q_BKGTH[:, :, :, queries])
        score_BKGQC = _capped(_scores(q_BKRH, k_BKHT, queries, keys, scale), softcap)
        seen_B11QC = _seen(queries, keys, segment_ids_BT, sliding_window)
        score_BKGQC = jnp.where(seen_B11QC, score_BKGQC, -jnp.inf)
        max_BKGQ = score_BKGQC.max(axis=-1)
        weight_BKGQC = jnp.exp(score_BKGQC - max_BKGQ[..., None])
        sum_BKGQ = weight_BKGQC.sum(axis=-1)
        out_BKRH = _product(_rows(weight_BKGQC), v_BKTH[:, :, keys], q_BTNH)
        out_BKGQH = out_BKRH.reshape(*sum_BKGQ.shape, -1) / sum_BKGQ[..., None]
        outs.append(out_BKGQH.astype(q_BTNH.dtype))
        lses.append(max_BKGQ + jnp.log(sum_BKGQ))
    out_BTNH = rearrange(jnp.concatenate(outs, axis=3), "b k g t h -> b t (k g) h")
    return out_BTNH, jnp.concatenate(lses, axis=3)


def _pull(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    out_BTNH: jax.Array,
    lse_BKGT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients by q, k and v."""
    length, kv_heads = q_BTNH.shape[1], k_BTKH.shape[2]
    q_BKGTH, dout_BKGTH = (
        rearrange(x, "b t (k g) h -> b k g t h", k=kv_heads) for x in (q_BTNH, dout_BTNH)
    )
    k_BKTH = rearrange(k_BTKH, "b t k h -> b k t h")
    k_BKHT, v_BKHT = (rearrange(x, "b t k h -> b k h t") for x in (k_BTKH, v_BTKH))
    # Each query's sum over keys of weight * dweight, by way of the output.
    mean_BTN = (dout_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(axis=-1)
    mean_BKGT = rearrange(mean_BTN, "b t (k g) -> b k g t", k=kv_heads)
    dqs, dks, dvs = [], [], []
    for queries, keys in _blocks(length, sliding_window):
        q_BKRH, dout_BKRH = (_rows(x[:, :, :, queries]) for x in (q_BKGTH, dout_BKGTH))
        capped_BKGQC = _capped(_scores(q_BKRH, k_BKHT, queries, keys, scale), softcap)
        seen_B11QC = _seen(queries, keys, segment_ids_BT, sliding_window)
        score_BKGQC = jnp.where(seen_B11QC, capped_BKGQC, -jnp.inf)
        weight_BKGQC = jnp.exp(score_BKGQC - lse_BKGT[:, :, :, queries, None])
        dweight_BKRC = _product(dout_BKRH, v_BKHT[..., keys], q_BTNH)
        dweight_BKGQC = dweight_BKRC.reshape(weight_BKGQC.shape)
        dscore_BKGQC = weight_BKGQC * (dweight_BKGQC - mean_BKGT[:, :, :, queries, None])
        if softcap is not None:
            dscore_BKGQC *= 1.0 - jnp.square(capped_BKGQC / softcap)
        dscore_BKRC = _rows(dscore_BKGQC)
        dq_BKRH = _product(dscore_BKRC, k_BKTH[:, :, keys], q_BTNH)
        dqs.append(dq_BKRH.reshape(*score_BKGQC.shape[:-1], -1))
        dks.append(_product(q_BKRH.mT, dscore_BKRC, q_BTNH))
        dvs.append(_product(dout_BKRH.mT, _rows(weight_BKGQC), q_BTNH))
    dq_BTNH = rearrange(jnp.concatenate(dqs, axis=3), "b k g t h -> b t (k g) h") * scale
    dk_BKHT, dv_BKHT = (_sum_of_blocks(parts, length, sliding_window) for parts in (dks, dvs))
    dk_BTKH = rearrange(dk_BKHT * scale, "b k h t -> b t k h")
    dv_BTKH = rearrange(dv_BKHT, "b k h t -> b t k h")
    return (
        dq_BTNH.astype(q_BTNH.dtype),
        dk_BTKH.astype(k_BTKH.dtype),
        dv_BTKH.astype(v_BTKH.dtype),
    )


def _blocks(length: int, sliding_window: int | None) -> Iterator[tuple[slice, slice]]:
    """Each block of queries, and the keys that some of its queries see; starts are multiples."""
    size = max(BLOCK, -(-length // MAX_BLOCKS))
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if sliding_window is None else max(0, start - sliding_window + 1)
        yield slice(start, stop), slice(first // size * size, stop)


def _scores(
    q_BKRH: jax.Array, k_BKHT: jax.Array, queries: slice, keys: slice, scale: float
) -> jax.Array:
    """One block's scaled scores in fp32, [B, K, G, Q, C]."""
    score_BKRC = _product(q_BKRH, k_BKHT[..., keys], q_BKRH)
    batch, kv_heads, _, num_keys = score_BKRC.shape
    num_queries = queries.stop - queries.start
    return score_BKRC.reshape(batch, kv_heads, -1, num_queries, num_keys) * scale


def _capped(score: jax.Array, softcap: float | None) -> jax.Array:
    return score if softcap is None else softcap * jnp.tanh(score / softcap)


def _seen(
    queries: slice, keys: slice, segment_ids_BT: jax.Array | None, sliding_window: int | None
) -> jax.Array:
    """Which of a block's keys each of its queries sees, [B or 1, 1, 1, Q, C]."""
    index_Q, index_C = jnp.arange(queries.start, queries.stop), jnp.arange(keys.start, keys.stop)
    distance_QC = index_Q[:, None] - index_C[None, :]
    seen_BQC = (distance_QC >= 0)[None]
    if sliding_window is not None:
        seen_BQC &= (distance_QC < sliding_window)[None]
    if segment_ids_BT is not None:
        seen_BQC &= segment_ids_BT[:, queries, None] == segment_ids_BT[:, None, keys]
    return seen_BQC[:, None, None]


def _sum_of_blocks(parts: list[jax.Array], length: int, sliding_window: int | None) -> jax.Array:
    """Per-block gradients [..., C] of the keys that each block saw, summed to [..., T]."""
    blocks = list(_blocks(length, sliding_window))
    sums = []
    for own, _ in blocks:
        covering = [
            part[..., own.start - keys.start : own.stop - keys.start]
            for part, (_, keys) in zip(parts, blocks, strict=True)
            if keys.start <= own.start and own.stop <= keys.stop
        ]
        sums.append(sum(covering[1:], start=covering[0]))
    return jnp.concatenate(sums, axis=-1)


def _rows(x_BKGQx: jax.Array) -> jax.Array:
    return rearrange(x_BKGQx, "b k g q x -> b k (g q) x")


def _product(a: jax.Array, b: jax.Array, like: jax.Array) -> jax.Array:
    """Batched over B and K: [B, K, x, y] @ [B, K, y, z], in `like`'s dtype, fp32 out."""
    return product(a, b, ((3,), (2,)), ((0, 1), (0, 1)), compute_dtype=like.dtype)
