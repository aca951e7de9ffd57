"""From logits to tokens, on the device: a program of its own after the forward.

Shapes: R rows, Q positions of a row (one and its drafts), N = R Q of them or one, V columns of the
logits, C groups of LANES columns, W words of bits, S slots.

What is sampled is a function of the row's logits, parameters, seed and position alone: not of the
batch, nor of what was drafted. Each position takes one uniform number, of the key
fold_in(key(seed), position), through the inverse of the cumulated probabilities. A draft is kept
where it is what would have been sampled anyway, so speculation changes nothing.

The order is vLLM's: log-probabilities of the raw logits; allowed tokens, biases, penalties,
temperature, min_p, top_k, top_p, typical_p. The vocabulary is never sorted: a set of likeliest
tokens is all that are at least as likely as a threshold, which is found by bisection, so tokens of
one probability are in it or out of it together. On the CPU a row looks first at the groups of
columns that hold its highest logits, and at all of them only where those do not hold the set.

Where nothing is allowed (masks that contradict each other) the end-of-sequence token comes out,
which ends the request. Logits that are NaN count as forbidden.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.inference import sampler_state as column
from jaxdist.inference.sampler_state import LANES, SamplerState

# Columns of `rows`; drafts follow.
SLOT, POSITION, COUNT, DRAFTS = range(4)
# A row first tries to do with these many groups of columns, those of the highest logits.
HIGHEST_GROUPS = 64


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
    static_argnames=("vocab_size", "plain", "top_logprobs", "by_row"),
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
    top_logprobs: How many of the likeliest tokens to tell; None tells no log-probabilities.
    by_row: One row after the other, each doing only what its parameters ask for, rather than all
        at once: for the CPU.
    """
    num_rows, num_positions, num_columns = logits_RQV.shape
    logits_NV = logits_RQV.reshape(-1, num_columns)
    used_RQ = jnp.arange(num_positions)[None] < rows[:, COUNT, None]
    if plain:
        tokens_N = _argmax(jnp.where(jnp.arange(num_columns) < vocab_size, logits_NV, -jnp.inf))
    else:
        each = (
            jnp.repeat(rows, num_positions, axis=0),
            jnp.tile(jnp.arange(num_positions), num_rows),
            None if masks is None else masks.reshape(-1, masks.shape[-1]),
        )
        choose = partial(_choose, state, by_row)
        if by_row:
            tokens_N = jax.lax.map(
                lambda one: choose(*jax.tree.map(lambda x: x[None], one))[0], (logits_NV, *each)
            )
        else:
            tokens_N = choose(logits_NV, *each)
    tokens_RQ = jnp.where(used_RQ, tokens_N.reshape(num_rows, num_positions), 0)
    right_RQ = (tokens_RQ[:, :-1] == rows[:, DRAFTS:]) & used_RQ[:, 1:]
    num_right_R = jnp.sum(jnp.cumprod(right_RQ.astype(jnp.int32), axis=1), axis=1)
    num_tokens_R = jnp.where(rows[:, COUNT] > 0, 1 + num_right_R, 0)
    state = _record(state, rows[:, SLOT], tokens_RQ, num_tokens_R, counts=not plain)
    logprobs = None
    if top_logprobs is not None:
        logprobs = token_logprobs(logits_RQV, tokens_RQ, vocab_size=vocab_size, top=top_logprobs)
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
        tokens = jax.lax.cond(
            jnp.any(temperature > 0),
            lambda: jnp.where(
                temperature > 0, _draw(logits, numbers, whole, position, by_row), _argmax(logits)
            ),
            lambda: _argmax(logits),
        )
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


def _draw(
    logits_NV: jax.Array, numbers: jax.Array, whole: jax.Array, position: jax.Array, by_row: bool
) -> jax.Array:
    """Tokens [N] by temperature, filters, seed and position."""
    temperature = jnp.maximum(numbers[:, column.TEMPERATURE], 1e-5)  # vLLM's least
    likeliest = jnp.maximum(jnp.max(logits_NV, axis=-1), -3e38)
    # Ratios of the probabilities to the likeliest's.
    ratio_NV = jnp.exp((logits_NV - likeliest[:, None]) / temperature[:, None])
    total = jnp.sum(ratio_NV, axis=-1)
    seed = jax.lax.bitcast_convert_type(whole[:, column.SEED :], jnp.uint32)
    uniform = jax.vmap(
        lambda seed, position: jax.random.uniform(
            jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        )
    )(seed, position)

    def everywhere() -> jax.Array:
        return _inverse(_filtered(ratio_NV, total, numbers, whole), uniform)

    ratio_NCL = _groups(ratio_NV, 0)
    if not by_row or ratio_NCL.shape[1] <= HIGHEST_GROUPS:
        return everywhere()
    highest, group = jax.lax.top_k(jnp.max(ratio_NCL, axis=-1), HIGHEST_GROUPS + 1)
    border, group = highest[:, -1], jnp.sort(group[:, :-1], axis=-1)
    few = jnp.take_along_axis(ratio_NCL, group[:, :, None], axis=1).reshape(len(group), -1)

    def among_few() -> jax.Array:
        place = _inverse(_filtered(few, total, numbers, whole), uniform)
        chosen = jnp.take_along_axis(group, place[:, None] // LANES, axis=-1)[:, 0]
        return chosen.astype(jnp.int32) * LANES + place % LANES

    holds_all = _holds_all(few, border, total, numbers, whole)
    return jax.lax.cond(jnp.all(holds_all), among_few, everywhere)


def _holds_all(
    few: jax.Array, border: jax.Array, total: jax.Array, numbers: jax.Array, whole: jax.Array
) -> jax.Array:
    """Whether all that the filters keep is in `few`, which has every ratio above `border` [N].

    top_p needs the sum of what the filters before it keep, so it decides only without them.
    """
    above = few > border[:, None]
    min_p, top_k, top_p = (
        numbers[:, column.MIN_P],
        whole[:, column.TOP_K],
        numbers[:, column.TOP_P],
    )
    alone = (min_p <= 0) & (top_k == column.ALL) & (top_p < 1)
    mass = jnp.sum(jnp.where(above, few, 0), axis=-1)
    enough = (jnp.sum(above, axis=-1) >= top_k) | (alone & (mass >= top_p * total))
    return (min_p > border) | enough


def _filtered(
    ratio_NV: jax.Array, total: jax.Array, numbers: jax.Array, whole: jax.Array
) -> jax.Array:
    """`ratio_NV` with 0 for what min_p, top_k, top_p and typical_p leave out.

    ratio_NV: Of all columns, or of some that hold all that is kept. total: Of all columns.
    """

    def step(ratio_NV: jax.Array, applies: jax.Array, keep: Callable[..., jax.Array]) -> jax.Array:
        return jax.lax.cond(
            jnp.any(applies),
            lambda: jnp.where(applies[:, None] & ~keep(ratio_NV), 0, ratio_NV),
            lambda: ratio_NV,
        )

    min_p, top_p, typical_p = (
        numbers[:, i, None] for i in (column.MIN_P, column.TOP_P, column.TYPICAL_P)
    )
    top_k = whole[:, column.TOP_K, None]

    def likeliest(ratio_NV: jax.Array) -> jax.Array:
        def holds(least: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(ratio_NV >= least, 1.0, 0), axis=-1, keepdims=True) >= top_k

        return ratio_NV >= _largest(holds, len(ratio_NV), 1.0)

    def nucleus(ratio_NV: jax.Array) -> jax.Array:
        def mass(least: jax.Array | float) -> jax.Array:
            return jnp.sum(jnp.where(ratio_NV >= least, ratio_NV, 0), axis=-1, keepdims=True)

        unfiltered = (min_p <= 0) & (top_k == column.ALL)
        wanted = top_p * jnp.where(unfiltered, total[:, None], mass(0.0))
        return ratio_NV >= _largest(lambda least: mass(least) >= wanted, len(ratio_NV), 1.0)

    def typical(ratio_NV: jax.Array) -> jax.Array:
        kept = jnp.sum(ratio_NV, axis=-1, keepdims=True)
        log = jnp.log(jnp.where(ratio_NV > 0, ratio_NV, 1))
        distance = jnp.abs(log - jnp.sum(ratio_NV * log, axis=-1, keepdims=True) / kept)

        def holds(most: jax.Array) -> jax.Array:
            mass = jnp.sum(jnp.where(distance < most, ratio_NV, 0), axis=-1, keepdims=True)
            return mass < typical_p * kept

        return distance <= _largest(holds, len(ratio_NV), jnp.inf)

    ratio_NV = step(ratio_NV, min_p[:, 0] > 0, lambda ratio: ratio >= min_p)
    ratio_NV = step(ratio_NV, top_k[:, 0] < column.ALL, likeliest)
    ratio_NV = step(ratio_NV, top_p[:, 0] < 1, nucleus)
    return step(ratio_NV, typical_p[:, 0] < 1, typical)


def _largest(holds: Callable[[jax.Array], jax.Array], num: int, most: float) -> jax.Array:
    """The largest floats [num, 1] in [0, most] for which `holds`, which 0 does and growth ends.

    Floats that are not negative are in the order of their bits, of which it is a bisection: exact.
    """

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # holds, does not
        middle = low + (high - low) // 2
        yes = holds(jax.lax.bitcast_convert_type(middle, jnp.float32))
        return jnp.where(yes, middle, low), jnp.where(yes, high, middle)

    beyond = int(np.float32(most).view(np.int32)) + 1
    bounds = jnp.zeros((num, 1), jnp.int32), jnp.full((num, 1), beyond, jnp.int32)
    low, _ = jax.lax.fori_loop(0, beyond.bit_length(), narrow, bounds)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _inverse(ratio_NV: jax.Array, uniform: jax.Array) -> jax.Array:
    """Where the cumulated `ratio_NV` first exceeds the share `uniform` [N] of its sum.

    In two stages, among groups of columns and within one. Never a column of ratio 0 where there
    is another.
    """

    def stage(ratios: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        cumulated = jnp.cumsum(ratios, axis=-1)
        beyond = (cumulated > target[:, None]) & (ratios > 0)
        # By rounding the sum can end below the target: then the last one.
        last = ratios.shape[1] - 1 - jnp.argmax(ratios[:, ::-1] > 0, axis=-1)
        index = jnp.where(jnp.any(beyond, axis=-1), jnp.argmax(beyond, axis=-1), last)
        before = jnp.take_along_axis(cumulated - ratios, index[:, None], axis=-1)[:, 0]
        return index.astype(jnp.int32), jnp.maximum(target - before, 0)

    ratio_NCL = _groups(ratio_NV, 0)
    sums_NC = jnp.sum(ratio_NCL, axis=-1)
    group, rest = stage(sums_NC, uniform * jnp.sum(sums_NC, axis=-1))
    within = jnp.take_along_axis(ratio_NCL, group[:, None, None], axis=1)[:, 0]
    return group * LANES + stage(within, rest)[0]


def _argmax(logits_NV: jax.Array) -> jax.Array:
    """The likeliest column [N], the first of equals; NaN is none."""
    logits_NV = jnp.where(jnp.isnan(logits_NV), -jnp.inf, logits_NV)
    return jnp.argmax(logits_NV, axis=-1).astype(jnp.int32)


def _groups(values_NV: jax.Array, filler: float) -> jax.Array:
    """[N, C, LANES]."""
    num, num_columns = values_NV.shape
    missing = -num_columns % LANES
    padded = jnp.pad(values_NV, ((0, 0), (0, missing)), constant_values=filler)
    return padded.reshape(num, -1, LANES)


def _unpack(words_NW: jax.Array, num_columns: int) -> jax.Array:
    """Bits as bool [N, num_columns]."""
    shifts = jnp.arange(32, dtype=jnp.uint32)
    flags = (words_NW[:, :, None] >> shifts[None, None]) & 1
    return flags.reshape(len(words_NW), -1)[:, :num_columns].astype(bool)
