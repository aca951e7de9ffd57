"""The engine on a real model: batching, chunks, preemption, prefix hits, guesses, running ahead and
replicas change no token, greedy or sampled."""

import jax
import pytest

from jaxdist.config import MeshShape
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.naive import Sampling, generate
from jaxdist.inference.sampling.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

PROMPTS = [[3, 1, 4, 1, 5], list(range(1, 25)), list(range(1, 31)), [7, 8] * 6, [9]]
COUNT = 16
WISHES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5},
    "scored": {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
}
CHANGES = {
    "as it comes": {},
    "small chunks": {"max_num_batched_tokens": 5},
    "no cache": {"enable_prefix_caching": False},
    "not ahead": {"run_ahead": False},
    "guesses": {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    "longest prefix first": {"policy": "lpm"},
}


@pytest.fixture(scope="module", params=["1x1x1", "2x1x2"])
def runner(request, model_of) -> ModelRunner:
    """Four of these sequences need 46 blocks a replica; it has 15, so they push each other out."""
    model = model_of(max_position_embeddings=64)
    mesh = MeshShape.parse(request.param)
    return ModelRunner(
        model.config,
        lambda like: jax.tree.map(lambda leaf, at: jax.device_put(leaf, at.sharding), model, like),
        mesh=mesh,
        options=RunnerOptions(
            block_size=4,
            num_blocks=16,
            max_num_seqs=4 * mesh.dp,
            max_row_tokens=32,
            max_drafts=3,
            dtype="float32",
        ),
    )


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
        if name.startswith("scored"):
            pairs = [*zip(output.outputs[0].logprobs, want.outputs[0].logprobs, strict=True)]
            pairs += zip(output.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True)
            for got, expected in pairs:
                token = next(iter(expected))
                assert got[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)
    stats = engine.stats()
    if runner.num_replicas == 1:
        assert stats.num_preemptions > 0
    assert (stats.prefix_hits > 0) == (change != "no cache")
    assert (stats.counters.num_accepted_tokens > 0) == (change == "guesses")
    assert all(replica.num_used == 0 for replica in stats.replicas)
