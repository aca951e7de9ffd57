"""Causal attention of a training or prefill step, and the plain masked softmax it must equal.

Shapes: B batch rows, T queries, S keys, N query heads, K key/value heads (N = K * G, head n reads
key head n // G), G query heads a key head, H head dim.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.blocked_attention import blocked_attention
from jaxdist.ops.product import platform


def causal_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """softmax(q k^T * scale) v over the keys at or before each query; [B, T, N, H] in q's dtype.

    segment_ids [B, T]: a query sees only keys of its own segment (packed documents).
    sliding_window: a query sees itself and the `sliding_window - 1` keys before it.
    scale: defaults to 1 / sqrt(H). The softmax is fp32.
    A remat policy keeps the result by the name attn_out.
    """
    scale = q_BTNH.shape[-1] ** -0.5 if scale is None else scale
    if not _cudnn_takes(q_BTNH):
        return blocked_attention(q_BTNH, k_BTKH, v_BTKH, segment_ids, sliding_window, scale)
    mask_B1TT = None
    if segment_ids is not None:
        mask_B1TT = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BTKH,
        v_BTKH,
        mask=mask_B1TT,
        scale=scale,
        is_causal=True,
        local_window_size=None if sliding_window is None else (sliding_window - 1, 0),
        implementation="cudnn",
    )
    return checkpoint_name(out_BTNH, "attn_out")


def reference_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
) -> jax.Array:
    """The slow twin of `causal_attention`: the whole [T, T] matrix, one masked softmax."""
    index_BT = jnp.arange(q_BTNH.shape[1])[None, :]
    mask_BTS = attention_mask(index_BT, index_BT, segment_ids, segment_ids, sliding_window)
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, mask_BTS, scale=scale)


def attention_mask(
    query_positions_BT: jax.Array,
    key_positions_BS: jax.Array,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    sliding_window: int | None = None,
) -> jax.Array:
    """Which keys each query sees, [B, T, S] bool: up to itself, in its window and segment."""
    distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
    mask_BTS = distance_BTS >= 0
    if sliding_window is not None:
        mask_BTS &= distance_BTS < sliding_window
    if query_segments_BT is not None and key_segments_BS is not None:
        mask_BTS &= query_segments_BT[:, :, None] == key_segments_BS[:, None, :]
    return mask_BTS


def masked_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask_BTS: jax.Array,
    *,
    scale: float | None = None,
) -> jax.Array:
    """Softmax attention under an explicit mask (decoding against a dense cache); fp32 inside.

    Every query must see at least one key.
    """
    batch, length, heads, head_dim = q_BTNH.shape
    scale = head_dim**-0.5 if scale is None else scale
    kv_heads = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST
    score_BKGTS = jnp.einsum(
        "btkgh,bskh->bkgts",
        q_BTKGH.astype(jnp.float32),
        k_BSKH.astype(jnp.float32),
        precision=highest,
    )
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS * scale, -jnp.inf)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1)
    out_BTKGH = jnp.einsum(
        "bkgts,bskh->btkgh", weight_BKGTS, v_BSKH.astype(jnp.float32), precision=highest
    )
    return out_BTKGH.reshape(q_BTNH.shape).astype(q_BTNH.dtype)


def _cudnn_takes(q_BTNH: jax.Array) -> bool:
    """Whether cuDNN's flash attention can run it, which is only known where the GPU is."""
    _, length, _, head_dim = q_BTNH.shape
    here = platform() == "gpu" and jax.default_backend() == "gpu"
    fits = head_dim % 8 == 0 and head_dim <= 128 and length % 2 == 0
    return here and fits and q_BTNH.dtype in (jnp.bfloat16, jnp.float16)
