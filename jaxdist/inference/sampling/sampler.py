"""From logits to tokens, on the device: a program of its own after the forward.

Shapes: R rows, Q positions of a row (one and its drafts), N = R Q of them or one, V columns of the
logits, W words of bits, S slots.

What is sampled is a function of the row's logits, parameters, seed and position alone: not of the
batch, nor of what was drafted. Each position takes one uniform number, of the key
fold_in(key(seed), position), through the inverse of the cumulated probabilities. A draft is kept
where it is what would have been sampled anyway, so speculation changes nothing.

The order is vLLM's: log-probabilities of the raw logits; allowed tokens, biases, penalties,
temperature, min_p, top_k, top_p, typical_p (the last five in `drawing`).

Where nothing is allowed (masks that contradict each other) the end-of-sequence token comes out,
which ends the request. Logits that are NaN count as forbidden.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.inference.sampling import sampler_state as column
from jaxdist.inference.sampling.drawing import draw
from jaxdist.inference.sampling.sampler_state import SamplerState

# Columns of `rows`; drafts follow.
SLOT, POSITION, COUNT, DRAFTS = range(4)


class Logprobs(NamedTuple):
    """Log-probabilities of the raw logits at some positions; leading dims [...] are theirs."""

    chosen: jax.Array  # f32 [...]
    rank: jax.Array  # int32 [...], 1 for the likeliest
    top_ids: jax.Array  # int32 [..., top], likeliest first
    top: jax.Array  # f32 [..., top]


class Sampled(NamedTuple):
    """What came of a step."""

    tokens: jax.Array  # int32 [R, Q], 0 where a position is not used
    num_tokens: jax.Array  # int32 [R], how many of them count: right drafts and one more
    logprobs: Logprobs | None  # [R, Q]


@partial(
    jax.jit,
    static_argnames=("vocab_size", "plain", "columns_over", "top_logprobs", "by_row"),
    donate_argnames="state",
)
def sample(
    logits_RQV: jax.Array,
    state: SamplerState,
    rows: jax.Array,
    masks: jax.Array | None = None,
    *,
    vocab_size: int,
    plain: bool = False,
    columns_over: str | None = None,
    top_logprobs: int | None = None,
    by_row: bool = True,
) -> tuple[Sampled, SamplerState]:
    """Sample at each position of each row.

    logits_RQV: f32.
    state: Given back with the tokens that count, both in `last` and in the output's counts.
    rows: int32 [R, 3 + Q - 1]: slot, S for a row that is filler; position in the sequence of the
        first token sampled; how many of the Q positions are used, num_drafts + 1, or 0; drafts.
    masks: uint32 [R, Q, at most W], allowed tokens, as `Row.masks`; None allows all.
    vocab_size: Columns from it on are padding.
    plain: Every row's parameters are `is_plain` and there are no masks: counts are not kept.
    columns_over: A manual axis of the mesh whose members each have some columns of the logits, in
        order, and share the work; all else is whole.
    top_logprobs: How many of the likeliest tokens to tell; None tells no log-probabilities.
    by_row: One row after the other, each doing only what its parameters ask for, rather than all
        at once: for the CPU.
    """
    num_rows, num_positions, _ = logits_RQV.shape
    logits_NV = logits_RQV.reshape(num_rows * num_positions, -1)
    used_RQ = jnp.arange(num_positions)[None] < rows[:, COUNT, None]
    if plain:
        tokens_N = _likeliest(logits_NV, vocab_size, columns_over)
    else:
        each = (
            jnp.repeat(rows, num_positions, axis=0),
            jnp.tile(jnp.arange(num_positions), num_rows),
            None if masks is None else masks.reshape(-1, masks.shape[-1]),
        )
        choose = partial(_choose, state, by_row)
        if by_row:
            tokens_N = _one_by_one(choose, logits_NV, each, columns_over)
        else:
            tokens_N = choose(_whole(logits_NV, columns_over), *each)
    tokens_RQ = jnp.where(used_RQ, tokens_N.reshape(num_rows, num_positions), 0)
    right_RQ = (tokens_RQ[:, :-1] == rows[:, DRAFTS:]) & used_RQ[:, 1:]
    num_right_R = jnp.sum(jnp.cumprod(right_RQ.astype(jnp.int32), axis=1), axis=1)
    num_tokens_R = jnp.where(rows[:, COUNT] > 0, 1 + num_right_R, 0)
    state = _record(state, rows[:, SLOT], tokens_RQ, num_tokens_R, counts=not plain)
    logprobs = None
    if top_logprobs is not None:
        whole_RQV = _whole(logits_RQV, columns_over)
        logprobs = token_logprobs(whole_RQV, tokens_RQ, vocab_size=vocab_size, top=top_logprobs)
    return Sampled(tokens_RQ, num_tokens_R, logprobs), state


@partial(jax.jit, static_argnames=("vocab_size", "top"))
def token_logprobs(
    logits_V: jax.Array, tokens: jax.Array, *, vocab_size: int, top: int
) -> Logprobs:
    """Log-probabilities of `tokens` [...] by logits [..., V], and of the `top` likeliest ones."""
    logits_V = jnp.where(jnp.arange(logits_V.shape[-1]) < vocab_size, logits_V, -jnp.inf)
    chosen = jnp.take_along_axis(logits_V, tokens[..., None], axis=-1)
    norm = jax.nn.logsumexp(logits_V, axis=-1)
    values, ids = jax.lax.top_k(logits_V, top)
    return Logprobs(
        chosen=chosen[..., 0] - norm,
        rank=1 + jnp.sum(logits_V > chosen, axis=-1, dtype=jnp.int32),
        top_ids=ids.astype(jnp.int32),
        top=values - norm[..., None],
    )


def _record(
    state: SamplerState, slot_R: jax.Array, tokens_RQ: jax.Array, num_R: jax.Array, *, counts: bool
) -> SamplerState:
    """`state` with the tokens that count. Out of range is dropped: slot S, and column V."""
    counted_RQ = jnp.arange(tokens_RQ.shape[1])[None] < num_R[:, None]
    slot_R = jnp.where(num_R > 0, slot_R, len(state.last))
    last_R = jnp.take_along_axis(tokens_RQ, jnp.maximum(num_R - 1, 0)[:, None], axis=1)[:, 0]
    state = state._replace(last=state.last.at[slot_R].set(last_R, mode="drop"))
    if counts:
        kept_RQ = jnp.where(counted_RQ, tokens_RQ, state.counts.shape[1])
        more = state.counts.at[slot_R[:, None], kept_RQ].add(1, mode="drop")
        state = state._replace(counts=more)
    return state


def _whole(logits: jax.Array, columns_over: str | None) -> jax.Array:
    """All columns of logits [..., V]."""
    if columns_over is None:
        return logits
    return jax.lax.all_gather(logits, columns_over, axis=logits.ndim - 1, tiled=True)


def _one_by_one(
    choose: Callable[..., jax.Array], logits_NV: jax.Array, each: Any, columns_over: str | None
) -> jax.Array:
    """`choose` [N], of one row after the other; members with some columns each take some rows."""

    def tokens(logits_NV: jax.Array, each: Any) -> jax.Array:
        def one(row: Any) -> jax.Array:
            return choose(*jax.tree.map(lambda x: x[None], row))[0]

        return jax.lax.map(one, (logits_NV, *each))

    size = 1 if columns_over is None else jax.lax.axis_size(columns_over)
    share, left = divmod(len(logits_NV), size)
    if columns_over is None or left:
        return tokens(_whole(logits_NV, columns_over), each)
    first = jax.lax.axis_index(columns_over) * share
    own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, share), each)
    logits_NV = jax.lax.all_to_all(logits_NV, columns_over, 0, 1, tiled=True)
    return jax.lax.all_gather(tokens(logits_NV, own), columns_over, tiled=True)


def _choose(
    state: SamplerState,
    by_row: bool,
    logits_NV: jax.Array,
    row: jax.Array,
    ahead: jax.Array,
    masks: jax.Array | None,
) -> jax.Array:
    """Tokens int32 [N], of `row` [N, 3 + Q - 1] at `ahead` [N] drafts after its first position."""
    slot = jnp.minimum(row[:, SLOT], len(state.last) - 1)
    numbers, whole = state.numbers[slot], state.whole[slot]
    used = (ahead < row[:, COUNT]) & (row[:, SLOT] < len(state.last))
    position = row[:, POSITION] + ahead
    num_columns = logits_NV.shape[1]

    def work() -> jax.Array:
        early = position - whole[:, column.PROMPT_LENGTH] < whole[:, column.MIN_TOKENS]
        allowed = state.allowed[slot] & ~jnp.where(early[:, None], state.enders[slot], 0)
        if masks is not None:
            missing = allowed.shape[1] - masks.shape[1]
            allowed &= jnp.pad(masks, ((0, 0), (0, missing)))
        allowed_NV = _unpack(allowed, num_columns) & (logits_NV > -jnp.inf)
        logits = _biased(state, slot, whole, jnp.where(allowed_NV, logits_NV, 0))
        drafts = jnp.where(
            jnp.arange(row.shape[1] - DRAFTS)[None] < ahead[:, None], row[:, DRAFTS:], num_columns
        )
        logits = _penalized(state, slot, numbers, drafts, logits)
        # Finite, so that differences are numbers.
        logits = jnp.where(allowed_NV, jnp.clip(logits, -3e38, 3e38), -jnp.inf)
        temperature = numbers[:, column.TEMPERATURE]

        def sampled() -> jax.Array:
            drawn = draw(logits, numbers, whole, position, by_row)
            # One row alone is here because it is to be drawn.
            return drawn if by_row else jnp.where(temperature > 0, drawn, _argmax(logits))

        tokens = jax.lax.cond(jnp.any(temperature > 0), sampled, lambda: _argmax(logits))
        return jnp.where(jnp.any(allowed_NV, axis=-1), tokens, whole[:, column.DEAD_END])

    return jax.lax.cond(jnp.any(used), work, lambda: jnp.zeros(len(row), jnp.int32))


def _biased(
    state: SamplerState, slot: jax.Array, whole: jax.Array, logits_NV: jax.Array
) -> jax.Array:
    def add() -> jax.Array:
        row = jnp.arange(len(slot))[:, None]
        return logits_NV.at[row, state.bias_ids[slot]].add(state.biases[slot], mode="drop")

    return jax.lax.cond(jnp.any(whole[:, column.NUM_BIASES] > 0), add, lambda: logits_NV)


def _penalized(
    state: SamplerState,
    slot: jax.Array,
    numbers: jax.Array,
    drafts: jax.Array,  # [N, Q - 1] that come before, V where they do not
    logits_NV: jax.Array,
) -> jax.Array:
    repetition, presence, frequency = (
        numbers[:, i, None] for i in (column.REPETITION, column.PRESENCE, column.FREQUENCY)
    )

    def penalize() -> jax.Array:
        row = jnp.arange(len(slot))[:, None]
        counts = state.counts[slot].at[row, drafts].add(1, mode="drop")
        seen = (counts > 0) | _unpack(state.prompt[slot], logits_NV.shape[1])
        factor = jnp.where(logits_NV > 0, 1 / repetition, repetition)
        logits = logits_NV * jnp.where(seen, factor, 1)
        return logits - frequency * counts - presence * (counts > 0)

    needed = (repetition != 1) | (presence != 0) | (frequency != 0)
    return jax.lax.cond(jnp.any(needed), penalize, lambda: logits_NV)


def _likeliest(logits_NV: jax.Array, vocab_size: int, columns_over: str | None) -> jax.Array:
    """The likeliest token [N] by raw logits, the first of equals."""
    num_columns = logits_NV.shape[1]
    first = 0 if columns_over is None else jax.lax.axis_index(columns_over) * num_columns
    valid_NV = (first + jnp.arange(num_columns)[None] < vocab_size) & ~jnp.isnan(logits_NV)
    logits_NV = jnp.where(valid_NV, logits_NV, -jnp.inf)
    tokens_N = first + _argmax(logits_NV)
    if columns_over is None:
        return tokens_N
    own_N = logits_NV.max(axis=-1)
    is_most_N = own_N == jax.lax.pmax(own_N, columns_over)
    return jax.lax.pmin(jnp.where(is_most_N, tokens_N, jnp.iinfo(jnp.int32).max), columns_over)


def _argmax(logits_NV: jax.Array) -> jax.Array:
    """The likeliest column [N], the first of equals.

    As two reductions of one value each, of which XLA:CPU makes vectors: half the time of argmax.
    """
    columns_1V = jnp.arange(logits_NV.shape[-1], dtype=jnp.int32)[None]
    is_most_NV = logits_NV == logits_NV.max(axis=-1, keepdims=True)
    return jnp.where(is_most_NV, columns_1V, columns_1V[0, -1]).min(axis=-1)


def _unpack(words_NW: jax.Array, num_columns: int) -> jax.Array:
    """Bits as bool [N, num_columns]."""
    shifts = jnp.arange(32, dtype=jnp.uint32)
    flags = (words_NW[:, :, None] >> shifts[None, None]) & 1
    return flags.reshape(len(words_NW), -1)[:, :num_columns].astype(bool)
