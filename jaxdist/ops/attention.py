"""Causal attention of a training or prefill step, and the plain masked softmax it must equal.

Shapes: B batch rows, T queries, S keys, N query heads, K key/value heads (N = K * G, head n reads
key head n // G), G query heads a key head, H head dim, Hv that of the values.
"""

from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.ops.blocked_attention import blocked_attention
from jaxdist.ops.product import platform

# Whether a GPU that is compiled for, but is not here, is taken to have cuDNN.
cudnn_is_there = ContextVar("cudnn_is_there", default=False)


def causal_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    is_local: bool | jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """softmax(q k^T * scale) v over the keys at or before each query; [B, T, N, Hv] in q's dtype.

    segment_ids [B, T]: a query sees only keys of its own segment (packed documents).
    sliding_window: a query sees itself and the `sliding_window - 1` keys before it.
    is_local: whether the window holds here; it may be traced, None is yes.
    scale: defaults to 1 / sqrt(H). The softmax is fp32.
    softcap: scaled scores s become softcap * tanh(s / softcap).
    Values may be of another width Hv than queries and keys.
    A remat policy keeps the result by the name attn_out.
    """
    length = q_BTNH.shape[1]
    if scale is None:
        scale = float(q_BTNH.shape[-1] ** -0.5)
    if is_local is False or (sliding_window is not None and sliding_window >= length):
        sliding_window = None
    if sliding_window is None or not isinstance(is_local, jax.Array):
        is_local = None
    if platform() == "tpu" and _is_whole():
        from jaxdist.ops import attention_tpu

        if attention_tpu.takes(q_BTNH, v_BTKH):
            return attention_tpu.kernel_attention(
                q_BTNH, k_BTKH, v_BTKH, segment_ids, is_local, sliding_window, scale, softcap
            )
    if softcap is not None or not cudnn_takes(q_BTNH, v_BTKH):
        return blocked_attention(
            q_BTNH, k_BTKH, v_BTKH, segment_ids, is_local, sliding_window, scale, softcap
        )
    mask_B1TT = None
    if segment_ids is not None:
        mask_B1TT = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if is_local is not None and sliding_window is not None:
        index_1T = jnp.arange(length)[None, :]
        window_1TT = attention_mask(
            index_1T, index_1T, sliding_window=sliding_window, is_local=is_local
        )
        mask_B1TT = window_1TT[:, None] if mask_B1TT is None else mask_B1TT & window_1TT[:, None]
        sliding_window = None
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
    is_local: bool | jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """The slow twin of `causal_attention`: the whole [T, T] matrix, one masked softmax."""
    index_BT = jnp.arange(q_BTNH.shape[1])[None, :]
    mask_BTS = attention_mask(
        index_BT, index_BT, segment_ids, segment_ids, sliding_window, is_local
    )
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, mask_BTS, scale=scale, softcap=softcap)


def attention_mask(
    query_positions_BT: jax.Array,
    key_positions_BS: jax.Array,
    query_segments_BT: jax.Array | None = None,
    key_segments_BS: jax.Array | None = None,
    sliding_window: int | None = None,
    is_local: bool | jax.Array | None = None,
) -> jax.Array:
    """Which keys each query sees, [B, T, S] bool: up to itself, in its window and segment.

    is_local: whether the window holds; None is yes.
    """
    distance_BTS = query_positions_BT[:, :, None] - key_positions_BS[:, None, :]
    mask_BTS = distance_BTS >= 0
    if sliding_window is not None:
        in_window_BTS = distance_BTS < sliding_window
        mask_BTS &= in_window_BTS if is_local is None else in_window_BTS | ~jnp.asarray(is_local)
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
    softcap: float | None = None,
) -> jax.Array:
    """Softmax attention under an explicit mask (decoding against a dense cache); fp32 inside.

    Every query must see at least one key.
    """
    batch, length, heads, head_dim = q_BTNH.shape
    factor = head_dim**-0.5 if scale is None else scale
    kv_heads = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
    highest = jax.lax.Precision.HIGHEST
    score_BKGTS = jnp.einsum(
        "btkgh,bskh->bkgts",
        q_BTKGH.astype(jnp.float32),
        k_BSKH.astype(jnp.float32),
        precision=highest,
    )
    score_BKGTS = score_BKGTS * factor
    if softcap is not None:
        score_BKGTS = softcap * jnp.tanh(score_BKGTS / softcap)
    score_BKGTS = jnp.where(mask_BTS[:, None, None], score_BKGTS, -jnp.inf)
    weight_BKGTS = jax.nn.softmax(score_BKGTS, axis=-1)
    out_BTKGH = jnp.einsum(
        "bkgts,bskh->btkgh", weight_BKGTS, v_BSKH.astype(jnp.float32), precision=highest
    )
    return out_BTKGH.reshape(batch, length, heads, -1).astype(q_BTNH.dtype)


def cudnn_takes(q_BTNH: jax.Array, v_BTKH: jax.Array) -> bool:
    """Whether cuDNN's flash attention can run it, which is only known where the GPU is."""
    _, length, _, head_dim = q_BTNH.shape
    here = platform() == "gpu" and (jax.default_backend() == "gpu" or cudnn_is_there.get())
    fits = head_dim % 8 == 0 and head_dim <= 128 and length % 2 == 0
    fits = fits and v_BTKH.shape[-1] == head_dim
    return here and fits and q_BTNH.dtype in (jnp.bfloat16, jnp.float16)


def _is_whole() -> bool:
    """Whether arrays are all here: the partitioner cannot cut Pallas' kernels."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual
