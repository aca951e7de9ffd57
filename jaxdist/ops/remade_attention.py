"""Attention that keeps no weights: a backend's forward, and its backward that makes them again.

Kept, under the name attn_out, are the output and the log of the softmax's sum, beside the inputs
(FlashAttention, arXiv 2205.14135).

Shapes: B batch rows, T tokens, N query heads, K key/value heads, H head dim; the log-sum-exp is
laid out as the backend likes.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

Attend = Callable[..., tuple[jax.Array, jax.Array]]  # (q, k, v, segments) -> output, log-sum-exp
Pull = Callable[..., tuple[jax.Array, ...]]  # (those, output, log-sum-exp, dout) -> dq, dk, dv
Kept = tuple[jax.Array | None, ...]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 7, 8, 9))
def remade_attention(
    attend: Attend,
    pull: Pull,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    is_local: jax.Array | None,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """[B, T, N, H]. Both functions take the last three as keywords; a traced `is_local` chooses
    between a window and none when it runs."""
    arrays = q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, is_local
    return _forward(attend, pull, *arrays, sliding_window, scale, softcap)[0]


def _forward(
    attend: Attend,
    pull: Pull,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    is_local: jax.Array | None,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, Kept]:
    arrays = (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT)
    attend = partial(attend, scale=scale, softcap=softcap)
    out_BTNH, lse = _by_window(attend, is_local, sliding_window, arrays)
    # Named here, since a remat policy sees only names given to the very arrays that are kept.
    out_BTNH = checkpoint_name(out_BTNH, "attn_out")
    lse = checkpoint_name(lse, "attn_out")
    return out_BTNH, (*arrays, is_local, out_BTNH, lse)


def _backward(
    attend: Attend,
    pull: Pull,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
    kept: Kept,
    dout_BTNH: jax.Array,
) -> tuple[jax.Array | None, ...]:
    *arrays, is_local, out_BTNH, lse = kept
    pull = partial(pull, scale=scale, softcap=softcap)
    arguments = (*arrays, out_BTNH, lse, dout_BTNH)
    return (*_by_window(pull, is_local, sliding_window, arguments), None, None)


remade_attention.defvjp(_forward, _backward)


def _by_window(
    function: Callable[..., Any],
    is_local: jax.Array | None,
    sliding_window: int | None,
    arguments: tuple[Any, ...],
) -> Any:
    """`function(*arguments, sliding_window=...)`, without the window where `is_local` is false."""
    local = partial(function, sliding_window=sliding_window)
    if is_local is None:
        return local(*arguments)
    return jax.lax.cond(is_local, local, partial(function, sliding_window=None), *arguments)
