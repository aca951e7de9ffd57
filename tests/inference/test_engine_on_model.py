"""The engine on a real model: batching, chunks, preemption, prefix hits, guesses, running ahead and
replicas change no token, greedy or sampled."""

import random
from typing import Any

import jax
import pytest

from jaxdist.config import MeshShape
from jaxdist.data.tokenizer import BytesTokenizer
from jaxdist.inference.device.compilations import num_compilations
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.device.warm_up import warm_up
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.naive import Sampling, generate
from jaxdist.inference.sampling.sampling_params import SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.slow

PROMPTS = [[3, 1, 4, 1, 5], list(range(1, 25)), list(range(1, 31)), [7, 8] * 6, [9]]
COUNT = 16
WISHES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5},
    "scored": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},  # takes no prefix
    "told": {"temperature": 0.0, "logprobs": 2},
}
CHANGES = {
    "as it comes": {},
    "small chunks": {"max_num_batched_tokens": 5},
    "no cache": {"enable_prefix_caching": False},
    "not ahead": {"run_ahead": False},
    "guesses": {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "longest prefix first": {"policy": "lpm"},
}


def runner_of(model, mesh: MeshShape, num_blocks: int) -> ModelRunner:
    return ModelRunner(
        model.config,
        lambda like: jax.tree.map(lambda leaf, at: jax.device_put(leaf, at.sharding), model, like),
        mesh=mesh,
        options=RunnerOptions(
            block_size=4,
            num_blocks=num_blocks,
            max_num_seqs=4 * mesh.dp,
            max_row_tokens=32,
            max_drafts=3,
            dtype="float32",
        ),
    )


@pytest.fixture(scope="module", params=["1x1x1", "2x1x2"])
def runner(request, model_of) -> ModelRunner:
    """Four of these sequences need 46 blocks a replica; it has 15, so they push each other out."""
    return runner_of(model_of(max_position_embeddings=64), MeshShape.parse(request.param), 16)


def run(runner: ModelRunner, options: EngineOptions, together: bool) -> tuple[dict, Engine]:
    engine, last = Engine(runner, options=options, eos_ids=()), {}
    for name, wish in WISHES.items():
        for i, prompt in enumerate(PROMPTS):
            engine.add_request(f"{name} {i}", prompt, SamplingParams(max_tokens=COUNT, **wish))
            while engine.has_unfinished_requests() and not together:
                last |= {output.request_id: output for output in engine.step()}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.check_integrity()
    return last, engine


@pytest.fixture(scope="module")
def alone(runner) -> dict:
    """Each request on its own, nothing shared."""
    options = EngineOptions(enable_prefix_caching=False, run_ahead=False)
    return run(runner, options, together=False)[0]


def test_alone_is_naive_generation(alone, model_of):
    model = model_of(max_position_embeddings=64)
    for i, prompt in enumerate(PROMPTS):
        want = list(generate(model, prompt, Sampling(max_tokens=COUNT)))
        assert list(alone[f"greedy {i}"].outputs[0].token_ids) == want


def test_a_seed_writes_what_naive_generation_writes_on_every_mesh(runner, model_of):
    model, drawn = model_of(max_position_embeddings=64), {"temperature": 0.8, "seed": 5}
    engine, last = Engine(runner, eos_ids=()), {}
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, SamplingParams(max_tokens=COUNT, **drawn))
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
    for i, prompt in enumerate(PROMPTS):
        want = list(generate(model, prompt, Sampling(max_tokens=COUNT, **drawn)))
        assert list(last[str(i)].outputs[0].token_ids) == want


@pytest.mark.parametrize("change", CHANGES)
def test_every_way_gives_what_each_request_gives_alone(change, runner, alone):
    last, engine = run(runner, EngineOptions(**CHANGES[change]), together=True)
    for name, output in last.items():
        want = alone[name]
        assert list(output.outputs[0].token_ids) == list(want.outputs[0].token_ids), name
        if want.outputs[0].logprobs is not None:
            pairs = [*zip(output.outputs[0].logprobs, want.outputs[0].logprobs, strict=True)]
            if want.prompt_logprobs is not None:
                pairs += zip(output.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True)
            for got, expected in pairs:
                token = next(iter(expected))
                assert got[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
    told = [output for name, output in last.items() if name.startswith("told")]
    assert any(output.num_cached_tokens for output in told) == (change != "no cache")
    stats = engine.stats()
    if runner.num_replicas == 1:
        assert stats.num_preemptions > 0
    assert (stats.prefix_hits > 0) == (change != "no cache")
    assert (stats.counters.num_accepted_tokens > 0) == (change == "guesses")
    assert all(replica.num_used == 0 for replica in stats.replicas)


def any_params(rng: random.Random) -> SamplingParams:
    """Some of all that can be asked for."""
    kinds: dict[str, Any] = {
        "n": rng.choice([1, 1, 1, 2]),
        "temperature": rng.choice([0.0, 0.5, 1.0, 2.0]),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.choice([-1, 1, 3, 200]),
        "min_p": rng.uniform(0, 1),
        "typical_p": rng.uniform(0.1, 1),
        "repetition_penalty": rng.uniform(0.5, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "logit_bias": {rng.randrange(257): rng.uniform(-9, 9) for _ in range(rng.randrange(5))},
        "allowed_token_ids": rng.sample(range(257), rng.randrange(1, 99)),
        "bad_words": [rng.choice(["a", "ab", "xyz"])],
        "stop": [rng.choice(["a", "\n", "end"])],
        "stop_token_ids": [rng.randrange(257)],
        "ignore_eos": True,
        "min_tokens": 1,
        "logprobs": rng.randrange(21),
        "prompt_logprobs": rng.randrange(21),
        "structured_outputs": StructuredOutputsParams(choice=["yes", "no"]),
    }
    names = rng.sample(sorted(kinds), rng.randrange(5))
    return SamplingParams(
        max_tokens=rng.randrange(1, 6),
        seed=rng.randrange(2**32),
        **{name: kinds[name] for name in names},
    )


def test_a_thousand_random_requests_compile_nothing(model_of):
    model = model_of(max_position_embeddings=64, vocab_size=257)
    runner = runner_of(model, MeshShape.parse("1x1x1"), 30)
    warm_up(runner)
    options = EngineOptions(num_speculative_tokens=3, prompt_lookup_min=1)
    engine, rng, finished = Engine(runner, BytesTokenizer(), options), random.Random(0), 0
    before = num_compilations()
    for i in range(1000):
        prompt = [rng.randrange(256) for _ in range(rng.choice([1, 3, 9, 40, 50]))]
        pooling = rng.choice([None] * 9 + ["mean", "last"])
        engine.add_request(
            str(i), prompt, any_params(rng), pooling=pooling, priority=rng.randrange(2)
        )
        if not rng.randrange(20):
            finished += engine.abort_request(str(rng.randrange(i + 1))) is not None
        while engine.stats().num_waiting > 8 or (i == 999 and engine.has_unfinished_requests()):
            finished += sum(output.finished for output in engine.step())
    assert finished == 1000
    assert num_compilations() == before and runner.stats()["num_compilations"] == 0
    assert engine.stats().num_preemptions and engine.stats().counters.num_accepted_tokens
