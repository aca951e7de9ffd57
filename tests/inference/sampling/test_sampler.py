"""The sampler against a slow one in numpy that sorts, and what a sample may depend on."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.inference.sampling import drawing
from jaxdist.inference.sampling.sampler import sample, token_logprobs
from jaxdist.inference.sampling.sampler_state import (
    SamplerState,
    bits,
    empty_state,
    is_plain,
    slot_state,
    start_slot,
    words,
)
from jaxdist.inference.sampling.sampling_params import SamplingParams

VOCAB, COLUMNS, EOS = 299, 307, 298  # ids, columns with padding, end-of-sequence
SLOTS = 4


def state_of(
    *params: SamplingParams, prompt=(1, 2, 3), output=(), columns: int = COLUMNS
) -> SamplerState:
    state = empty_state(SLOTS, columns)
    for slot, p in enumerate(params):
        one = slot_state(
            p, list(prompt), list(output), eos_ids=[EOS], vocab_size=VOCAB, num_columns=columns
        )
        state = start_slot(state, slot, one)
    return state


def rows_of(*rows: tuple[int, int, int], drafts: Any = ()) -> jax.Array:
    """(slot, position, count) of each; drafts [R, Q - 1]."""
    drafts = np.reshape(np.array(drafts, np.int32), (len(rows), -1))
    return jnp.asarray(np.concatenate([np.array(rows, np.int32), drafts], axis=1))


def run(logits, state, rows, masks=None, **how: Any):
    logits = np.asarray(logits, np.float32)
    logits = logits.reshape(rows.shape[0], rows.shape[1] - 2, -1)
    return sample(jnp.asarray(logits), state, rows, masks, vocab_size=VOCAB, **how)


def draw_many(params: SamplingParams, logits: np.ndarray, count: int) -> np.ndarray:
    """Tokens at `count` positions from the same logits."""
    state, tokens = state_of(params), []
    for first in range(0, count, 500):
        many = [(0, 3 + first + i, 1) for i in range(500)]
        out, state = run(np.tile(logits, (500, 1)), state, rows_of(*many), by_row=False)
        tokens.append(out.tokens[:, 0])
    return np.concatenate(tokens)[:count]


# The slow twin: float64, one row, sorted.


def processed(
    logits: np.ndarray, params: SamplingParams, prompt=(1, 2, 3), output=(), mask=None
) -> np.ndarray:
    """Logits [COLUMNS] before temperature."""
    x = logits.astype(np.float64).copy()
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    counts = np.bincount(np.array(output, int), minlength=COLUMNS)
    seen = (counts > 0) | (np.bincount(prompt, minlength=COLUMNS) > 0)
    r = params.repetition_penalty
    x = np.where(seen, np.where(x > 0, x / r, x * r), x)
    x -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    allowed = np.arange(COLUMNS) < VOCAB
    if params.allowed_token_ids is not None:
        allowed &= np.isin(np.arange(COLUMNS), params.allowed_token_ids)
    if len(output) < params.min_tokens:
        allowed &= ~np.isin(np.arange(COLUMNS), [EOS, *params.stop_token_ids])
    if mask is not None:
        allowed &= mask
    return np.where(allowed & ~np.isnan(logits), x, -np.inf)


def kept(
    x: np.ndarray, params: SamplingParams, nudges: tuple[float, float] = (0, 0)
) -> tuple[np.ndarray, np.ndarray]:
    """(which tokens may be drawn, their probabilities); `nudges` move top_p and typical_p."""
    log = ((x - x.max()) / np.float32(params.temperature)).astype(np.float32)
    p = np.exp(log.astype(np.float64))
    keep = (p >= np.finfo(np.float32).tiny) & (p >= params.min_p)

    def shares() -> np.ndarray:
        return np.where(keep, p, 0) / p[keep].sum()

    def until(score: np.ndarray, mass: float) -> np.ndarray:
        """All whose score is at most that at which the cumulated share reaches `mass`."""
        order = np.argsort(score, kind="stable")
        reached = np.cumsum(shares()[order]) >= mass
        return score <= (score[order][np.argmax(reached)] if reached.any() else np.inf)

    if 0 < params.top_k < COLUMNS:
        q = np.where(keep, p, 0)
        keep &= q >= np.sort(q)[-params.top_k]
    if params.top_p < 1:
        keep &= until(-shares(), params.top_p + nudges[0])
    if params.typical_p < 1:
        surprise = np.log(np.where(keep, p, 1).astype(np.float32))
        far = np.abs(surprise - np.sum(shares() * surprise)).astype(np.float32)
        keep &= until(np.where(keep, far, np.inf), params.typical_p + nudges[1])
    return keep, shares()


def device_kept(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Which tokens the device may draw, from processed logits."""
    one = slot_state(params, [1], eos_ids=[EOS], vocab_size=VOCAB, num_columns=COLUMNS)
    numbers, whole = jnp.asarray(one.numbers)[None], jnp.asarray(one.whole)[None]
    log = jnp.asarray((x - x.max()) / params.temperature, jnp.float32)[None]
    ratio = jnp.exp(log)
    return np.asarray(_filtered(ratio, jnp.sum(ratio, axis=-1), numbers, whole)[0] > 0)


_filtered = jax.jit(drawing.filtered)
shares = st.floats(0.01, 1.0).map(lambda x: round(x, 3))
filters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.just(1.0) | shares,
    top_k=st.just(0) | st.integers(2, 400),
    min_p=st.just(0.0) | st.floats(0.0, 0.5, width=16),
    typical_p=st.just(1.0) | shares,
)


@st.composite
def some_logits(draw) -> np.ndarray:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(0, draw(st.sampled_from([0.1, 1.0, 4.0, 30.0])), COLUMNS)
    if draw(st.booleans()):  # ties
        x = np.round(x)
    if draw(st.booleans()):
        x[rng.random(COLUMNS) < 0.5] = -np.inf
    x[draw(st.integers(0, VOCAB - 1))] = 1.0
    return x.astype(np.float32)


@given(some_logits(), filters)
@example(np.zeros(COLUMNS, np.float32), SamplingParams(top_p=0.1, top_k=3, typical_p=0.1))
@settings(deadline=None, max_examples=150)
def test_kept_sets_are_those_of_sorting(x: np.ndarray, params: SamplingParams):
    x[VOCAB:] = -np.inf
    found = device_kept(x, params)
    # Where a mass is met to fp32's rounding, it may be reached by one token more or less.
    nudges = itertools.product((0, 2e-6, -2e-6), repeat=2)
    assert any(np.array_equal(found, kept(x, params, nudge)[0]) for nudge in nudges)


PARAMS = (
    SamplingParams(temperature=0, seed=0),
    SamplingParams(seed=1, temperature=0.7, top_p=0.9, top_k=40, presence_penalty=1.0),
    SamplingParams(seed=2, typical_p=0.8, min_p=0.01, logit_bias={3: 5.0, 200: -100.0}),
    SamplingParams(
        seed=3,
        repetition_penalty=1.7,
        frequency_penalty=0.5,
        allowed_token_ids=range(0, VOCAB, 2),
        stop_token_ids=[4],
        min_tokens=4,
    ),
)
SCALE = 3.0


@pytest.fixture(scope="module")
def logits() -> np.ndarray:
    """[4, 3, COLUMNS], high where the padding is."""
    x = np.random.default_rng(0).normal(0, SCALE, (4, 3, COLUMNS)).astype(np.float32)
    x[..., VOCAB:] = 50
    return x


ROWS = dict(drafts=[[7, 8], [9, 9], [11, 12], [2, 2]])


def four_rows(position: int = 5) -> jax.Array:
    return rows_of((0, position, 3), (1, position, 3), (2, position, 2), (3, position, 1), **ROWS)


@pytest.mark.parametrize("by_row", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_position_is_drawn_from_its_own_distribution(logits: np.ndarray, by_row: bool):
    """Masks, penalties that count drafts, and nothing of the batch: what it would be alone."""
    allowed = np.random.default_rng(1).random((4, 3, VOCAB)) < 0.7
    masks = np.stack([[bits(np.flatnonzero(a), VOCAB) for a in row] for row in allowed])
    state = state_of(*PARAMS, output=(5, 5))
    out, after = run(logits, state, four_rows(), jnp.asarray(masks), by_row=by_row)
    for r, (params, drafts) in enumerate(zip(PARAMS, ROWS["drafts"], strict=True)):
        for j in range((3, 3, 2, 1)[r]):
            mask = np.pad(allowed[r, j], (0, COLUMNS - VOCAB))
            x = processed(logits[r, j], params, output=(5, 5, *drafts[:j]), mask=mask)
            token = int(out.tokens[r, j])
            if params.temperature == 0:
                assert token == np.argmax(x)
            else:
                assert kept(x, params)[0][token]
            # The same position alone: a row without drafts whose output holds them already.
            alone = state_of(params, output=(5, 5, *drafts[:j]))
            one, _ = run(
                logits[r, j], alone, rows_of((0, 5 + j, 1)), jnp.asarray(masks[r, j, None, None])
            )
            assert int(one.tokens[0, 0]) == token
    assert (out.tokens[2, 2], out.tokens[3, 1]) == (0, 0)
    np.testing.assert_array_equal(out.num_tokens, [1, 1, 1, 1])
    np.testing.assert_array_equal(after.last, out.tokens[:, 0])
    np.testing.assert_array_equal(np.sum(after.counts, axis=1), 3)


def test_drafts_are_kept_up_to_the_first_wrong_one(logits: np.ndarray):
    """Speculation changes no token, for greedy and for sampling, and counts what it keeps."""
    for params in PARAMS:
        state, text = state_of(params), []
        for j in range(3):
            out, state = run(logits[0, j], state, rows_of((0, 3 + j, 1)))
            text.append(int(out.tokens[0, 0]))
        for right in range(3):
            drafts = [*text[:right], *(VOCAB - 1 - t for t in text[right:2])]
            out, fast = run(logits[0], state_of(params), rows_of((0, 3, 3), drafts=[drafts]))
            assert int(out.num_tokens[0]) == right + 1
            assert out.tokens[0, : right + 1].tolist() == text[: right + 1]
            assert int(fast.last[0]) == text[right]
            expected = np.bincount(text[: right + 1], minlength=COLUMNS)
            np.testing.assert_array_equal(fast.counts[0], expected)


def test_the_batch_changes_nothing():
    """A row alone, first or last of 32, and among others of every kind: the same token."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, SCALE, (32, COLUMNS)).astype(np.float32)
    state = state_of(*PARAMS)
    slots, positions = rng.integers(0, 4, 32), rng.integers(3, 2**20, 32)
    rows = np.stack([slots, positions, np.ones(32, int)], axis=1)
    together = {}
    for by_row in (True, False):
        out, _ = run(logits, state_of(*PARAMS), rows_of(*rows), by_row=by_row)
        together[by_row] = np.asarray(out.tokens[:, 0])
    np.testing.assert_array_equal(together[True], together[False])
    shuffled = rng.permutation(32)
    out, _ = run(logits[shuffled], state_of(*PARAMS), rows_of(*rows[shuffled]))
    np.testing.assert_array_equal(out.tokens[:, 0], together[True][shuffled])
    for r in range(8):
        out, state = run(logits[r], state_of(*PARAMS), rows_of(rows[r]))
        assert int(out.tokens[0, 0]) == together[True][r]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=7),
        pytest.param(SamplingParams(seed=8, temperature=0.5, top_p=0.8), marks=pytest.mark.slow),
        pytest.param(SamplingParams(seed=9, top_k=5, min_p=0.05), marks=pytest.mark.slow),
        SamplingParams(seed=2**64 - 1, typical_p=0.6),
    ],
)
def test_samples_follow_the_distribution(params: SamplingParams):
    x = np.random.default_rng(5).normal(0, 2, COLUMNS).astype(np.float32)
    count = 20_000
    keep, shares = kept(processed(x, params), params)
    found = np.bincount(draw_many(params, x, count), minlength=COLUMNS)
    assert not found[~keep].any()
    expected = shares * count
    rare = expected < 5
    bins = [np.append(e[~rare], e[rare].sum()) for e in (found, expected)]
    bins = [b if b[-1] else b[:-1] for b in bins]
    assert scipy.stats.chisquare(*bins).pvalue > 1e-3


def test_seeds_and_positions_are_independent():
    x = np.zeros(COLUMNS, np.float32)
    texts = [draw_many(SamplingParams(seed=seed), x, 100) for seed in (1, 2, 1 + 2**32, -1)]
    for i, text in enumerate(texts):
        assert len(set(text.tolist())) > 60
        for other in texts[:i]:
            assert np.mean(text == other) < 0.1


def test_greedy_is_the_lowest_of_the_likeliest():
    x = np.zeros((4, COLUMNS), np.float32)
    x[:, VOCAB:] = 9  # padding
    x[:, [17, 40]] = 1
    x[:, 5] = np.nan
    greedy = SamplingParams(temperature=0)
    likeliest = [replace(greedy, temperature=t, top_k=1, seed=s) for t, s in ((1.0, 1), (2.0, 5))]
    assert is_plain(greedy) and all(map(is_plain, likeliest))
    state = state_of(greedy, *likeliest, SamplingParams(seed=3, temperature=1e-9))
    rows = rows_of(*((slot, 9, 1) for slot in range(4)))
    for how in ({"plain": True}, {"by_row": True}, {"by_row": False}):
        out, state = run(x, state, rows, **how)
        assert out.tokens[:3, 0].tolist() == [17, 17, 17]
        assert int(out.tokens[3, 0]) in ((17,) if "plain" in how else (17, 40))
        np.testing.assert_array_equal(state.last, out.tokens[:, 0])


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(
    "how",
    [{"plain": True}, {"by_row": True}, {"by_row": False}, {"plain": True, "top_logprobs": 3}],
)
def test_members_who_share_the_columns_sample_what_one_does(how: dict, num_rows: int):
    x = np.random.default_rng(1).normal(size=(num_rows, 1, 310)).astype(np.float32)
    x[:, 0, [7, 290]] = 9  # the likeliest, one of each half
    x[:, 0, 300:] = 20  # padding
    params = [SamplingParams(seed=s, temperature=3 * (s % 2), top_p=0.9) for s in range(SLOTS)]
    rows = rows_of(*((slot, 9, 1) for slot in range(num_rows)))
    mesh = jax.make_mesh((2,), ("tp",))
    spec = P(None, None, "tp")

    def two(x, state, rows):
        give = partial(sample, vocab_size=VOCAB, columns_over="tp", **how)
        specs = (spec, P(), P())
        return jax.shard_map(give, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
            x, state, rows
        )

    expected, _ = sample(x, state_of(*params, columns=310), rows, vocab_size=VOCAB, **how)
    found, _ = jax.jit(two)(
        jax.device_put(x, NamedSharding(mesh, spec)), state_of(*params, columns=310), rows
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, expected)
    assert "plain" not in how or found.tokens[0, 0] == 7


@pytest.mark.parametrize("by_row", [True, False])
def test_a_dead_end_gives_end_of_sequence(by_row: bool):
    params = (
        SamplingParams(seed=1, allowed_token_ids=[EOS], min_tokens=9),
        SamplingParams(temperature=0, allowed_token_ids=[3]),
        SamplingParams(seed=1, top_p=0.5, typical_p=0.5, min_p=0.1, top_k=3),
        SamplingParams(seed=1, repetition_penalty=1e-30, presence_penalty=2.0),
    )
    x = np.full((4, COLUMNS), -np.inf, np.float32)
    x[0], x[1], x[3] = 0, 0, 3e38
    masks = np.full((4, 1, words(COLUMNS)), 2**32 - 1, np.uint32)
    masks[1] = bits([4], COLUMNS)
    rows = rows_of(*((slot, 5, 1) for slot in range(4)))
    out, _ = run(x, state_of(*params), rows, jnp.asarray(masks), by_row=by_row, top_logprobs=2)
    assert out.tokens[:3, 0].tolist() == [EOS] * 3
    assert 0 <= int(out.tokens[3, 0]) < VOCAB


def test_filler_rows_and_free_slots_change_nothing(logits: np.ndarray):
    state = state_of(*PARAMS)
    before = jax.tree.map(np.array, state)
    rows = rows_of((SLOTS, 0, 0), (1, 9, 0), (SLOTS, 0, 3), (2, 5, 1), drafts=np.zeros((4, 2), int))
    out, after = run(logits, state, rows)
    assert out.num_tokens.tolist()[:2] == [0, 0]
    token = int(out.tokens[3, 0])
    changed = {"last": before.last.copy(), "counts": before.counts.copy()}
    changed["last"][2], changed["counts"][2, token] = token, 1
    for name, value in before._replace(**changed)._asdict().items():
        np.testing.assert_array_equal(getattr(after, name), value)


def test_end_of_sequence_waits_for_min_tokens():
    x = np.zeros(COLUMNS, np.float32)
    x[EOS], x[4] = 9, 8
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[4])
    state = state_of(params)
    for position, expected in ((3, {0}), (4, {0}), (5, {EOS})):
        out, state = run(x, state, rows_of((0, position, 1)))
        assert int(out.tokens[0, 0]) in expected


def test_logprobs_are_of_the_raw_logits(logits: np.ndarray):
    out, _ = run(logits, state_of(*PARAMS), four_rows(), top_logprobs=5)
    raw = logits[..., :VOCAB].astype(np.float64)
    expected = raw - np.log(np.sum(np.exp(raw), axis=-1, keepdims=True))
    found = out.logprobs
    for r, j in np.ndindex(4, 3):
        token, e = int(out.tokens[r, j]), expected[r, j]
        np.testing.assert_allclose(found.chosen[r, j], e[token], rtol=1e-5, atol=1e-5)
        assert int(found.rank[r, j]) == 1 + np.sum(e > e[token])
        top = np.argsort(-e, kind="stable")[:5]
        np.testing.assert_array_equal(found.top_ids[r, j], top)
        np.testing.assert_allclose(found.top[r, j], e[top], rtol=1e-5, atol=1e-5)
    none = token_logprobs(jnp.asarray(logits), out.tokens, vocab_size=VOCAB, top=0)
    assert none.top_ids.shape == (4, 3, 0)
    np.testing.assert_array_equal(none.chosen, found.chosen)


def test_starting_a_slot_leaves_the_others_and_compiles_once(logits: np.ndarray):
    state = state_of(*PARAMS)
    others = jax.tree.map(lambda x: np.array(x)[[0, 1, 3]], state)
    size = start_slot._cache_size()
    one = slot_state(
        SamplingParams(seed=1, logit_bias={5: -3}, stop_token_ids=range(100)),
        range(VOCAB),
        [9, 9, 8],
        eos_ids=[],
        vocab_size=VOCAB,
        num_columns=COLUMNS,
    )
    state = start_slot(state, 2, one)
    assert start_slot._cache_size() == size
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(np.array(x)[[0, 1, 3]], y), state, others
    )
    assert state.counts[2, 9] == 2 and state.last[2] == 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.9),
        SamplingParams(seed=3, top_p=0.9, temperature=3.0),
        SamplingParams(seed=4, top_k=20, top_p=0.95),
        SamplingParams(seed=5, top_k=9000, top_p=0.5),
        SamplingParams(seed=6, min_p=0.2, typical_p=0.7),
        SamplingParams(seed=7, min_p=1e-6, top_p=0.9, typical_p=0.9),
    ],
    ids=["all", "top_p", "flat", "top_k", "many", "min_p", "little"],
)
def test_few_groups_do_where_they_hold_all(params: SamplingParams):
    """Tokens of a large vocabulary, with the highest groups first and without."""
    vocab = 20_000
    rng = np.random.default_rng(0)
    x = rng.permuted(np.tile(-2.5 * np.log(np.arange(1, vocab + 1)), (8, 1)), axis=1)
    one = slot_state(params, [1], eos_ids=[0], vocab_size=vocab, num_columns=vocab)
    numbers, whole = (jnp.tile(jnp.asarray(v), (8, 1)) for v in (one.numbers, one.whole))
    x = jnp.asarray(x, jnp.float32)

    def tokens(by_row: bool) -> np.ndarray:
        one_by_one = jax.jit(drawing.draw, static_argnums=4)
        found = [
            one_by_one(x[i : i + 1], numbers[:1], whole[:1], jnp.array([i]), by_row)
            for i in range(8)
        ]
        return np.concatenate(found)

    np.testing.assert_array_equal(tokens(True), tokens(False))
    np.testing.assert_array_equal(
        tokens(False), drawing.draw(x, numbers, whole, jnp.arange(8), False)
    )
