"""Causal attention on TPUs: one Pallas kernel forward, two backward, no score outside of them.

XLA:TPU makes code for each block of `blocked_attention` by itself, minutes for a long row; a
kernel is compiled once, in seconds. Scores lie with keys down and queries across, and arrays with
tokens last: statistics of a query are then a row, nothing is transposed, and no head dim is padded
to a tile's 128 lanes. The backward pass makes the weights again from the saved log-sum-exp
(FlashAttention, arXiv 2205.14135).

Shapes: B batch rows, T tokens, N query heads, K key/value heads (N = K * G, head n reads key head
n // G), H head dim, also of values, which may have one of their own. Of one block: Q queries,
C keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxdist.ops.product import platform
from jaxdist.ops.remade_attention import remade_attention

_BLOCKS = (512, 256, 128)  # queries, and keys: the largest that divides the length
_SUBLANES = 16  # of a tile of 16-bit numbers
_UNSEEN = -1e30  # a score; finite, since a query may see no key of a block


def takes(q_BTNH: jax.Array, v_BTKH: jax.Array) -> bool:
    """Whether the kernels can run it: whole blocks, whole tiles."""
    widths = q_BTNH.shape[-1], v_BTKH.shape[-1]
    whole = q_BTNH.shape[1] % _BLOCKS[-1] == 0 and all(w % _SUBLANES == 0 for w in widths)
    return whole and q_BTNH.dtype in (jnp.bfloat16, jnp.float32)


def kernel_attention(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    is_local: jax.Array | None,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> jax.Array:
    """As `blocked_attention`, where `takes` says so; elsewhere than on a TPU it is interpreted."""
    arrays = q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, is_local
    return remade_attention(_attend, _pull, *arrays, sliding_window, scale, softcap)


@dataclass(frozen=True, kw_only=True)
class _Scores:
    """How a block's scores are made, and which blocks of keys a block of queries sees."""

    size: int  # of blocks
    num_blocks: int
    sliding_window: int | None
    scale: float
    softcap: float | None

    def first(self, i: Any) -> Any:
        """The first block of keys that block `i` of queries sees; the last is its own."""
        if self.sliding_window is None:
            return 0
        return jnp.maximum(0, i * self.size - self.sliding_window + 1) // self.size

    def last(self, j: Any) -> Any:
        """The last block of queries that sees block `j` of keys."""
        if self.sliding_window is None:
            return self.num_blocks - 1
        seen = ((j + 1) * self.size + self.sliding_window - 2) // self.size
        return jnp.minimum(seen, self.num_blocks - 1)

    def meet(self, i: Any, j: Any) -> Any:
        """Whether some query of block i sees a key of block j."""
        return (self.first(i) <= j) & (j <= i)

    def of(self, q_HQ: Any, k_HC: Any, segments: tuple[Any, ...], i: Any, j: Any) -> Any:
        """Scores [C, Q] in fp32, and what softcap's derivative makes of them (None without)."""
        score_CQ = _product(k_HC, q_HQ, 0, 0) * self.scale
        slope_CQ = None
        if self.softcap is not None:
            tanh_CQ = jnp.tanh(score_CQ / self.softcap)
            score_CQ, slope_CQ = self.softcap * tanh_CQ, 1.0 - tanh_CQ * tanh_CQ
        query_CQ = i * self.size + jax.lax.broadcasted_iota(jnp.int32, score_CQ.shape, 1)
        key_CQ = j * self.size + jax.lax.broadcasted_iota(jnp.int32, score_CQ.shape, 0)
        seen_CQ = query_CQ >= key_CQ
        if self.sliding_window is not None:
            seen_CQ &= query_CQ - key_CQ < self.sliding_window
        if segments:
            of_queries_1Q, of_keys_C1 = (segment[...] for segment in segments)
            seen_CQ &= of_queries_1Q == of_keys_C1
        return jnp.where(seen_CQ, score_CQ, _UNSEEN), slope_CQ


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
    """Output and the log of the softmax's sum, [B, N, T]."""
    q_BNHT, k_BKHT, v_BKHT = map(_tokens_last, (q_BTNH, k_BTKH, v_BTKH))
    batch, heads, _, length = q_BNHT.shape
    width, group = v_BKHT.shape[2], heads // k_BKHT.shape[1]
    scores = _scores(length, sliding_window, scale, softcap)
    size, count = scores.size, scores.num_blocks

    def kernel(q, k, v, *rest: Any) -> None:
        *segments, out, lse, max_1Q, sum_1Q, total_HQ = rest
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _() -> None:
            max_1Q[...] = jnp.full_like(max_1Q, _UNSEEN)
            sum_1Q[...] = jnp.zeros_like(sum_1Q)
            total_HQ[...] = jnp.zeros_like(total_HQ)

        @pl.when(scores.meet(i, j))
        def _() -> None:
            score_CQ, _ = scores.of(q[...], k[...], tuple(segments), i, j)
            before_1Q = max_1Q[...]
            after_1Q = jnp.maximum(before_1Q, score_CQ.max(axis=0, keepdims=True))
            weight_CQ = jnp.exp(score_CQ - after_1Q)
            fade_1Q = jnp.exp(before_1Q - after_1Q)
            max_1Q[...] = after_1Q
            sum_1Q[...] = fade_1Q * sum_1Q[...] + weight_CQ.sum(axis=0, keepdims=True)
            own_HQ = _product(v[...], weight_CQ.astype(v.dtype), 1, 0)
            total_HQ[...] = fade_1Q * total_HQ[...] + own_HQ

        @pl.when(j == count - 1)
        def _() -> None:
            out[...] = (total_HQ[...] / sum_1Q[...]).astype(out.dtype)
            lse[...] = max_1Q[...] + jnp.log(sum_1Q[...])

    def keys(b, n, i, j):
        return b, n // group, 0, jnp.clip(j, scores.first(i), i)  # what is skipped is not fetched

    queries = _spec(lambda b, n, i, j: (b, n, 0, i), size)
    segment_specs = (lambda b, n, i, j: (b, 0, i)), (lambda *at: (at[0], keys(*at)[3], 0))
    out_BNHT, lse_BN1T = _call(
        kernel,
        grid=(batch, heads, count, count),
        arrays=[(q_BNHT, queries), *((x, _spec(keys, size)) for x in (k_BKHT, v_BKHT))],
        segments=_segments(segment_ids_BT, segment_specs, size),
        outs=[
            ((batch, heads, width, length), q_BTNH.dtype, queries),
            ((batch, heads, 1, length), jnp.float32, queries),
        ],
        scratch=[(1, size), (1, size), (width, size)],
    )
    return rearrange(out_BNHT, "b n h t -> b t n h"), lse_BN1T[:, :, 0]


def _pull(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    out_BTNH: jax.Array,
    lse_BNT: jax.Array,
    dout_BTNH: jax.Array,
    *,
    sliding_window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, ...]:
    """Gradients by q, k and v."""
    tokens_last = map(_tokens_last, (q_BTNH, k_BTKH, v_BTKH, dout_BTNH))
    q_BNHT, k_BKHT, v_BKHT, dout_BNHT = tokens_last
    batch, heads, head_dim, length = q_BNHT.shape
    kv_heads, width = v_BKHT.shape[1:3]
    group = heads // kv_heads
    scores = _scores(length, sliding_window, scale, softcap)
    size, count = scores.size, scores.num_blocks
    # Each query's sum over keys of weight * dweight, by way of the output.
    mean_BTN = (dout_BTNH.astype(jnp.float32) * out_BTNH.astype(jnp.float32)).sum(axis=-1)
    mean_BN1T, lse_BN1T = rearrange(mean_BTN, "b t n -> b n 1 t"), lse_BNT[:, :, None]

    def weights(q, k, v, dout, mean, lse, segments: tuple[Any, ...], i: Any, j: Any) -> Any:
        """Of one block: weights and gradients by scores before the scale, [C, Q]."""
        score_CQ, slope_CQ = scores.of(q[...], k[...], segments, i, j)
        weight_CQ = jnp.exp(score_CQ - lse[...])
        dscore_CQ = weight_CQ * (_product(v[...], dout[...], 0, 0) - mean[...])
        return weight_CQ, dscore_CQ if slope_CQ is None else dscore_CQ * slope_CQ

    def by_queries(q, k, v, dout, mean, lse, *rest: Any) -> None:
        *segments, dq, total_HQ = rest
        i, j = pl.program_id(2), pl.program_id(3)

        @pl.when(j == 0)
        def _() -> None:
            total_HQ[...] = jnp.zeros_like(total_HQ)

        @pl.when(scores.meet(i, j))
        def _() -> None:
            _, dscore_CQ = weights(q, k, v, dout, mean, lse, tuple(segments), i, j)
            total_HQ[...] += _product(k[...], dscore_CQ.astype(k.dtype), 1, 0)

        @pl.when(j == count - 1)
        def _() -> None:
            dq[...] = (total_HQ[...] * scale).astype(dq.dtype)

    def by_keys(q, k, v, dout, mean, lse, *rest: Any) -> None:
        *segments, dk, dv, dk_HC, dv_HC = rest
        j, g, i = pl.program_id(2), pl.program_id(3), pl.program_id(4)

        @pl.when((g == 0) & (i == 0))
        def _() -> None:
            dk_HC[...] = jnp.zeros_like(dk_HC)
            dv_HC[...] = jnp.zeros_like(dv_HC)

        @pl.when(scores.meet(i, j))
        def _() -> None:
            weight_CQ, dscore_CQ = weights(q, k, v, dout, mean, lse, tuple(segments), i, j)
            dk_HC[...] += _product(q[...], dscore_CQ.astype(q.dtype), 1, 1)
            dv_HC[...] += _product(dout[...], weight_CQ.astype(q.dtype), 1, 1)

        @pl.when((g == group - 1) & (i == count - 1))
        def _() -> None:
            dk[...] = (dk_HC[...] * scale).astype(dk.dtype)
            dv[...] = dv_HC[...].astype(dv.dtype)

    def call(kernel, grid, queries, keys, outs, scratch) -> list[jax.Array]:
        of_queries, of_keys = _spec(queries, size), _spec(keys, size)
        segment_specs = (
            lambda *at: (at[0], 0, queries(*at)[3]),
            lambda *at: (at[0], keys(*at)[3], 0),
        )
        return _call(
            kernel,
            grid=grid,
            arrays=[
                (q_BNHT, of_queries),
                (k_BKHT, of_keys),
                (v_BKHT, of_keys),
                *((x, of_queries) for x in (dout_BNHT, mean_BN1T, lse_BN1T)),
            ],
            segments=_segments(segment_ids_BT, segment_specs, size),
            outs=[(x.shape, x.dtype, of_queries if x is q_BNHT else of_keys) for x in outs],
            scratch=scratch,
        )

    (dq_BNHT,) = call(
        by_queries,
        (batch, heads, count, count),
        lambda b, n, i, j: (b, n, 0, i),
        lambda b, n, i, j: (b, n // group, 0, jnp.clip(j, scores.first(i), i)),
        [q_BNHT],
        [(head_dim, size)],
    )
    dk_BKHT, dv_BKHT = call(
        by_keys,
        (batch, kv_heads, count, group, count),
        lambda b, k, j, g, i: (b, k * group + g, 0, jnp.clip(i, j, scores.last(j))),
        lambda b, k, j, g, i: (b, k, 0, j),
        [k_BKHT, v_BKHT],
        [(head_dim, size), (width, size)],
    )
    return tuple(rearrange(x, "b n h t -> b t n h") for x in (dq_BNHT, dk_BKHT, dv_BKHT))


def _scores(
    length: int, sliding_window: int | None, scale: float, softcap: float | None
) -> _Scores:
    size = next(size for size in _BLOCKS if length % size == 0)
    return _Scores(
        size=size,
        num_blocks=length // size,
        sliding_window=sliding_window,
        scale=scale,
        softcap=softcap,
    )


def _tokens_last(x_BTNH: jax.Array) -> jax.Array:
    return rearrange(x_BTNH, "b t n h -> b n h t")


def _product(a: jax.Array, b: jax.Array, a_dim: int, b_dim: int) -> jax.Array:
    """Contracted over one dim of each, fp32 out; fp32 operands at the highest precision."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a,
        b,
        (((a_dim,), (b_dim,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _spec(at: Callable[..., Any], size: int) -> Callable[[tuple[int, ...]], pl.BlockSpec]:
    """Blocks of `size` tokens of arrays [B, N, x, T], at a place of the grid."""
    return lambda shape: pl.BlockSpec((None, None, shape[2], size), at)


def _segments(
    segment_ids_BT: jax.Array | None, at: tuple[Callable[..., Any], ...], size: int
) -> list[tuple[jax.Array, pl.BlockSpec]]:
    """Those of queries as a row, those of keys as a column; nothing without segments."""
    if segment_ids_BT is None:
        return []
    of_queries, of_keys = at
    return [
        (segment_ids_BT[:, None, :], pl.BlockSpec((None, 1, size), of_queries)),
        (segment_ids_BT[:, :, None], pl.BlockSpec((None, size, 1), of_keys)),
    ]


def _call(kernel, *, grid, arrays, segments, outs, scratch) -> list[jax.Array]:
    """`pallas_call`; results vary over the manual axes over which the first array does."""
    first = arrays[0][0]
    manual = jax.typeof(first).manual_axis_type
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[*(spec(x.shape) for x, spec in arrays), *(spec for _, spec in segments)],
        out_specs=[spec(shape) for shape, _, spec in outs],
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=manual) for shape, dtype, _ in outs
        ],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * 3 + ("arbitrary",) * (len(grid) - 3)
        ),
        interpret=platform() != "tpu",
    )(*(x for x, _ in arrays), *(x for x, _ in segments))
