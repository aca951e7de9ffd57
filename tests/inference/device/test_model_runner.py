"""Paged == dense == training logits, for every mesh; and after the warm-up nothing is compiled.

Compiling is what these tests take their time for, so the quick ones share one runner.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import MeshShape, UsageError
from jaxdist.inference.device import kv_pool
from jaxdist.inference.device.buckets import PROMPT_QUERIES
from jaxdist.inference.device.compilations import num_compilations
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.device.warm_up import programs, warm_up
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.step import PENDING
from jaxdist.models import Transformer, default_context
from jaxdist.ops.rope import rope_table
from jaxdist.parallel.mesh import make_mesh
from tests.inference.small_host import GREEDY, Host, dense, forward, runner_of, serve

SCORED = SamplingParams(temperature=0.0, seed=0, logprobs=3, prompt_logprobs=2)
PROMPTS = ([3, 1, 4, 1, 5], list(range(1, 50)), [7, 7], [9] * 33)
NUM_TOKENS = 7
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
}


@pytest.fixture(scope="module")
def make(model_of):
    """make(mesh, options..., **model fields) -> (ModelRunner, its model on one device)."""

    def make(mesh: str = "1x1x1", fields: dict | None = None, **options: Any):
        model = model_of(**{"max_position_embeddings": 64} | (fields or {}))
        return runner_of(model, mesh, **options), model

    return make


@pytest.fixture(scope="module")
def plain(make):
    """A runner on one device, and its model. A table has one width: 8 blocks."""
    return make(max_drafts=3, block_size=8, num_blocks=36)


SLOW = pytest.mark.slow
MESHES = [pytest.param(mesh, marks=SLOW) for mesh in ("1x1x1", "1x1x2", "2x1x1", "1x2x1", "1x1x4")]


def test_one_device_serves_what_the_training_model_gives(plain):
    runner, model = plain
    texts = serve(Host(runner, np.random.default_rng(1)), PROMPTS, NUM_TOKENS)
    assert texts == [dense(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("mesh", [pytest.param("2x2x2", marks=SLOW), *MESHES])
def test_every_mesh_serves_the_same(mesh, make):
    runner, model = make(mesh)
    texts = serve(Host(runner, np.random.default_rng(1)), PROMPTS, NUM_TOKENS)
    assert texts == [dense(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "fields"),
    [
        pytest.param(
            "1x1x1", {"sliding_window": 5, "qk_norm": True, "qkv_bias": True}, id="window"
        ),
        pytest.param(
            "1x1x1", {"rope_scaling": LONGROPE, "tie_word_embeddings": True}, id="longrope"
        ),
        # Weights in blocks that tp shares, and a head of zeros.
        pytest.param(
            "2x1x2",
            {
                "hidden_size": 64,
                "num_attention_heads": 6,
                "num_key_value_heads": 3,
                "head_dim": 64,
                "intermediate_size": 128,
                "vocab_size": 120,
                "qkv_bias": True,
            },
            id="padded heads",
        ),
        # What the two stages hold differs, which only the running program knows.
        pytest.param(
            "1x2x2", {"sliding_window": 5, "sliding_window_pattern": 2}, id="windows by layer"
        ),
    ],
)
def test_every_kind_of_model_is_served(mesh, fields, make):
    runner, model = make(mesh, fields)
    texts = serve(Host(runner, np.random.default_rng(1)), PROMPTS, NUM_TOKENS)
    assert texts == [dense(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("mesh", [None, pytest.param("2x2x2", marks=SLOW)])
def test_chunks_give_the_training_models_probabilities(mesh, make, plain):
    runner, model = plain if mesh is None else make(mesh)
    host, text = Host(runner, np.random.default_rng(2)), PROMPTS[1]
    expected = np.asarray(jax.nn.log_softmax(forward(model, text)))
    host.start(3, text, SCORED)
    found, position = [], 0
    for count in (1, 2, 35, 11):
        chunk = text[position : position + count]
        is_last = position + count == len(text)
        (result,) = host.step(host.row(3, chunk, position, sample=is_last))
        found += result.prompt_logprobs or []
        position += count
    assert result.token_ids == [expected[-1].argmax()]
    assert len(found) == len(text) - 1
    for entry, row, token in zip(found, expected, text[1:], strict=False):
        np.testing.assert_allclose(entry.chosen, row[token], atol=2e-4)
        assert entry.rank == 1 + np.sum(row > row[token])
        assert list(entry.top_ids) == np.argsort(-row)[:2].tolist()
    (sampled,) = result.logprobs
    np.testing.assert_allclose(sampled.top_logprobs, np.sort(expected[-1])[::-1][:3], atol=2e-4)


def test_masks_that_follow_do_what_those_at_hand_do(plain):
    runner, model = plain
    host = Host(runner, np.random.default_rng(3))
    first = dense(model, PROMPTS[0], 1)
    masks = np.zeros((1, -(-runner.vocab_size // 32)), np.uint32)
    masks[0, 1] = 1 << 5 | 1 << 9  # nothing but 37 and 41
    found = []
    for follow in (False, True):
        host.start(1, PROMPTS[0])
        host.start(2, PROMPTS[2])
        rows = [host.row(1, PROMPTS[0], 0), host.row(2, PROMPTS[2], 0)]
        before = runner.launch(rows)
        held = {"masks_follow": True} if follow else {"masks": masks}
        rows = [host.row(1, [PENDING], 5, **held), host.row(2, [PENDING], 2)]
        launched = runner.launch(rows)
        assert runner.wait(before)[0].token_ids == first
        if follow:
            runner.sample(launched, {0: masks})
        # The next step sees what was sampled.
        after = runner.launch([host.row(1, [PENDING], 6), host.row(2, [PENDING], 3)])
        steps = (runner.wait(launched), runner.wait(after))
        found.append([result.token_ids for step in steps for result in step])
        host.stop(1)
        host.stop(2)
    assert found[0] == found[1]
    assert (
        found[0][0][0] in (37, 41) and found[0][1] + found[0][3] == dense(model, PROMPTS[2], 3)[1:]
    )


def test_guesses_change_nothing_and_right_ones_are_kept(plain):
    runner, model = plain
    host, prompt = Host(runner, np.random.default_rng(3)), PROMPTS[0]
    text = dense(model, prompt, 12)
    host.start(0, prompt)
    (first,) = host.step(host.row(0, prompt, 0))
    out = list(first.token_ids)
    for right in (3, 0, 2, 1):
        drafts = text[len(out) : len(out) + 3]
        drafts[right:] = [(token + 1) % 61 for token in drafts[right:]]
        row = host.row(0, [out[-1], *drafts], len(prompt) + len(out) - 1, num_drafts=len(drafts))
        (result,) = host.step(row)
        assert len(result.token_ids) == right + 1
        out += result.token_ids
    assert out == text[: len(out)]
    # A recomputed sequence: old tokens and guesses in one row.
    host.stop(0)
    host.start(0, prompt)
    row = host.row(0, [*prompt, *out[:8]], 0, num_drafts=2)
    (result,) = host.step(row)
    assert result.token_ids == out[6:9]


@pytest.mark.parametrize("mesh", [None, pytest.param("2x1x1", marks=SLOW)])
def test_embeddings_are_hidden_states_after_the_final_norm(mesh, make, plain):
    runner, model = plain if mesh is None else make(mesh)
    host, text = Host(runner, np.random.default_rng(4)), PROMPTS[1]
    hidden = hidden_states(model, text)
    for slot, pooling, expected in ((0, "mean", hidden.mean(0)), (3, "last", hidden[-1])):
        host.start(slot, text, pooling=pooling)
        (first,) = host.step(host.row(slot, text[:40], 0, sample=False))
        assert first.hidden is None
        (last,) = host.step(host.row(slot, text[40:], 40, sample=False))
        np.testing.assert_allclose(last.hidden, expected, atol=2e-4)


def hidden_states(model: Transformer, text: Sequence[int]) -> np.ndarray:
    """By the training model, [T, E]: before the head."""
    ctx = default_context(model.config)
    positions = jnp.arange(len(text))[None]

    @jax.jit
    def end_of_layers(model: Transformer) -> jax.Array:
        x = model.embed(jnp.array([text]), ctx)
        x, _ = model.apply_layers(x, rope_table(model.config, positions), ctx)
        return model.norm(x)[0]

    return np.asarray(end_of_layers(model))


@pytest.mark.slow
def test_nothing_is_compiled_after_the_warm_up(make):
    runner, _ = make("2x1x1", max_drafts=2, num_blocks=80)
    seen, before = [], num_compilations()
    count = warm_up(runner, lambda done, total, name: seen.append((done, total)))
    # Each at most once: the first runs find what threads compiled. Prompts have two outputs.
    num_prompts = sum(shape.queries == PROMPT_QUERIES for shape in runner.buckets.shapes)
    assert num_compilations() - before <= count + num_prompts
    assert seen == [(n, count) for n in range(count + 1)]
    assert count == sum(map(len, programs(runner)))
    rng = np.random.default_rng(5)
    host = Host(runner, rng)
    kinds = [
        GREEDY,
        SCORED,
        SamplingParams(temperature=0.7, top_k=5, seed=3),
        SamplingParams(temperature=0.7, presence_penalty=0.5, seed=3, logprobs=20),
    ]
    for _ in range(40):
        length, slots = rng.integers(1, 40), rng.permutation(4)[: rng.integers(1, 5)]
        rows, nexts = [], []
        for slot in map(int, slots):
            prompt = rng.integers(0, 61, length + slot).tolist()
            params = kinds[rng.integers(len(kinds))]
            pooling = "mean" if rng.random() < 0.1 else None
            host.start(slot, prompt, params, pooling)
            rows.append(host.row(slot, prompt, 0, sample=pooling is None))
            if pooling is not None:
                continue
            masks = None
            if rng.random() < 0.3:
                masks = rng.integers(0, 2**32, (3, 2), dtype=np.uint32)
            nexts.append(host.row(slot, [1, 2, 3], len(prompt), num_drafts=2, masks=masks))
        host.step(*rows)
        if nexts:
            host.step(*nexts)
        for slot in map(int, slots):
            host.stop(slot)
    stats = runner.stats()
    assert stats["num_compilations"] == 0
    assert 0 < stats["padding_ratio"] < 1


@pytest.mark.parametrize(
    ("mesh", "fields", "options", "message"),
    [
        ("1x1x3", {}, {}, "num_attention_heads=4 is not divisible by tp=3; choose tp from 1, 2, 4"),
        ("1x3x1", {}, {}, "num_hidden_layers=2 is not divisible by pp=3; choose pp from 1, 2"),
        ("3x1x1", {}, {}, "max-num-seqs=4 is not divisible by dp=3.*choose 6"),
        ("1x1x1", {}, {"max_model_len": 65}, "longer than the model's context of 64"),
        (
            "1x1x1",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            {"max_model_len": 65},
            "longer than the 64 tokens after which dynamic changes the rotation",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(mesh, fields, options, message, make):
    with pytest.raises(UsageError, match=message):
        make(mesh, fields, **options)


def test_the_pool_is_sized_by_the_memory_that_is_free(model_of, monkeypatch):
    config = model_of(max_position_embeddings=64).config

    def pool(mesh: str = "1x1x1", **options: Any) -> kv_pool.PoolSize:
        options = RunnerOptions(
            **{"block_size": 4, "max_num_seqs": 4, "dtype": "float32"} | options
        )
        return kv_pool.decide(config, make_mesh(MeshShape.parse(mesh)), options)

    # More than two times what four sequences of 64 tokens need is of no use.
    assert pool(memory_fraction=0.5).num_blocks == 1 + 2 * 16 * 4
    assert "128 blocks of 4 tokens (512 tokens a replica)" in str(pool(memory_fraction=0.5))
    monkeypatch.setattr(kv_pool, "USUAL", 32)  # a CPU's, where no fraction is asked for
    assert [pool(max_num_seqs=n).num_blocks for n in (1, 4)] == [1 + 16, 1 + 4 * 8]
    block = 2 * 4 * 2 * (8 + 8) * 4  # layers, tokens, heads, widths of key and value, bytes
    monkeypatch.setattr(kv_pool, "free_bytes", lambda device, count: 100 * block)
    assert [pool(memory_fraction=f).num_blocks for f in (0.5, 0.9)] == [50, 90]
    assert pool().num_blocks == 25
    assert pool(memory_fraction=0.5, dtype="bfloat16").num_blocks == 100
    # Stages share the layers, members of tp the heads as long as there are two.
    found = [pool(mesh, memory_fraction=0.25).num_blocks for mesh in ("1x2x1", "1x1x2", "1x1x4")]
    assert found == [50, 50, 50]
    with pytest.raises(UsageError, match="memory-fraction=0.01 of .* is less than two blocks"):
        pool(memory_fraction=0.01)


@pytest.mark.slow
def test_a_prime_vocabulary_is_divided_and_its_padding_never_sampled(make):
    runner, model = make("1x2x4", {"vocab_size": 61, "vocab_multiple": 1}, max_num_seqs=2)
    assert runner.config.padded_vocab_size == 64
    host = Host(runner, np.random.default_rng(6))
    (text,) = serve(host, PROMPTS[:1], NUM_TOKENS)
    assert text == dense(model, PROMPTS[0], NUM_TOKENS)
    loud = SamplingParams(temperature=100.0, seed=1)
    host.start(1, [5], loud)
    host.step(host.row(1, [5], 0))
    drawn = [host.step(host.row(1, [PENDING], 1 + i))[0].token_ids[0] for i in range(30)]
    assert max(drawn) < 61 and len(set(drawn)) > 15


@pytest.mark.slow
def test_what_is_not_finite_stays_with_its_sequence(make):
    runner, model = make(num_blocks=17)
    host = Host(runner, np.random.default_rng(7))
    rest, layers = runner._arrays
    poisoned = jax.tree.map(lambda a: a, rest)
    poisoned.embed_tokens = rest.embed_tokens.replace(rest.embed_tokens[...].at[60].set(np.inf))
    runner._arrays = poisoned, layers
    host.start(0, [60] * 60)
    host.step(host.row(0, [60] * 60, 0))
    host.stop(0)
    assert serve(host, PROMPTS[:1], 2) == [dense(model, PROMPTS[0], 2)]
