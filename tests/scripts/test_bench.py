"""The benchmarks: what they ask, how they count, that the contenders train; never how fast."""

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.scripts.programs import module, run


def test_spec_survives_the_way_to_its_process():
    spec_module, plan = module("bench.spec"), module("bench.plan")
    for comparison in plan.comparisons("/some/python"):
        for spec in (comparison.subject, comparison.reference):
            assert spec_module.Spec.from_json(spec.to_json()) == spec


def test_batches_are_the_same_in_every_process_and_labels_are_the_next_tokens():
    shape = module("bench.plan").SHAPES["tiny"]
    first, again = shape.batches(), shape.batches()
    np.testing.assert_array_equal(first, again)
    tokens, labels = first[0]
    assert tokens.shape == labels.shape == (shape.rows, shape.length)
    np.testing.assert_array_equal(tokens[:, 1:], labels[:, :-1])
    assert 0 <= tokens.min() and tokens.max() < shape.vocab_size


def test_every_run_of_ours_is_one_that_the_config_accepts():
    worker = module("bench.jaxdist_worker")
    for comparison in module("bench.plan").comparisons():
        for spec in (comparison.subject, comparison.reference):
            if spec.framework == "jaxdist":
                config = worker.run_config(spec)
                assert config.mesh_shape.size >= 1
                assert config.model.padded_vocab_size == spec.shape.vocab_size


def test_steps_replace_those_of_training_only():
    for comparison in module("bench.plan").comparisons(steps=9):
        assert comparison.steps == (1 if comparison.name == "compile_time" else 9)


@pytest.mark.parametrize(
    ("by", "target", "met", "text"),
    [
        ("speed", 1.5, True, ">= 1.5"),
        ("speed", 2.5, False, "MISSED"),
        ("time", 0.6, True, "<= 0.6"),
    ],
)
def test_ratio_is_of_paired_rounds(by: str, target: float, met: bool, text: str):
    comparison = next(module("bench.plan").comparisons())
    comparison = replace(comparison, by=by, target=target, steps=1)
    seconds = [(1.0, 2.0), (2.0, 4.0), (1.0, 9.0)]
    result = module("bench.report").Result(comparison=comparison, seconds=seconds)
    expected = [2.0, 2.0, 9.0]
    assert result.ratios == (expected if by == "speed" else [1 / ratio for ratio in expected])
    assert result.met is met
    assert text in result.line()
    record = json.loads(json.dumps(result.to_json()))
    assert record["met"] is met
    assert record["seconds"] == [list(pair) for pair in seconds]


def test_comparison_that_did_not_run_says_why():
    comparison = next(module("bench.plan").comparisons())
    result = module("bench.report").Result(comparison=comparison, problem="no such module")
    assert result.met is None
    assert result.line().endswith("not run: no such module")
    json.dumps(result.to_json())


@pytest.mark.parametrize(
    ("sizes", "losses", "problem"),
    [
        ((10, 10), (0.1, -1.0), ""),
        ((10, 11), (0.1, -1.0), "parameters"),
        ((10, 10), (0.1, 0.2), "did not fall"),
        ((10, 10), (2.0, -1.0), "is not ln V"),
        ((10, 10), (-0.5, -1.0), "is not ln V"),
        ((10, 10), (math.nan, -1.0), "is not ln V"),
    ],
)
def test_contenders_must_train_the_same_model(
    sizes: tuple[int, int], losses: tuple[float, float], problem: str
):
    """Losses are given as their distance from ln V."""
    comparison = next(module("bench.plan").comparisons())
    start = math.log(comparison.subject.shape.vocab_size)
    sides = [
        SimpleNamespace(
            spec=comparison.subject,
            about={"num_parameters": size},
            losses=[start + distance for distance in losses],
        )
        for size in sizes
    ]
    found = module("bench.ring").mismatch(*sides)
    assert (problem in found) if problem else not found


def test_worker_that_fails_is_reported_by_its_error():
    contender = module("bench.contender")
    spec = replace(next(module("bench.plan").comparisons()).subject, framework="absent")
    with pytest.raises(contender.ContenderFailed, match="No module named 'bench.absent_worker'"):
        contender.Contender(spec)


def test_silent_worker_is_given_up_at_the_deadline():
    contender = module("bench.contender")
    spec = next(module("bench.plan").comparisons()).subject
    with pytest.raises(contender.ContenderFailed, match="in time"):
        contender.Contender(spec, deadline=time.monotonic())


def test_bench_train_lists_and_refuses():
    listed = run("bench_train.py", "--list")
    names = listed.stdout.split()
    assert listed.returncode == 0
    assert len(names) == len(set(names))
    assert {"15m/bf16/eager", "135m/fp32/eager+alloc", "overhead/1x4x1"} <= set(names)
    refused = run("bench_train.py", "--only", "16m/*")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_bench_gpu_refuses_in_one_line_without_a_gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    refused = run("bench_gpu.py")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1
    assert not refused.stdout


def test_bench_gpu_counts_and_halves_the_rows(monkeypatch: pytest.MonkeyPatch):
    gpu, spec_module = module("bench_gpu"), module("bench.spec")

    class Small:
        """A card that holds two rows."""

        about = {"flops_per_token": 2.0, "peak_flops": 1e6}
        losses = [3.0, 2.0]

        def __init__(self, spec: Any, deadline: float):
            if spec.shape.rows > 2:
                raise gpu.ContenderFailed("out of memory", out_of_memory=True)

        def turn(self, steps: int) -> float:
            return 0.5

        def close(self) -> None:
            pass

    monkeypatch.setattr(gpu, "Contender", Small)
    shape = replace(gpu.SHAPE, rows=8, length=100)
    spec = spec_module.Spec(framework="jaxdist", shape=shape, precision="bf16", device="gpu")
    result = gpu.measured(spec, time.monotonic() + gpu.BUDGET)
    tokens_per_second = 2 * 100 * gpu.NUM_STEPS / 0.5
    assert result.tokens_per_second == tokens_per_second
    assert f"MFU {tokens_per_second * 2 / 1e6:.1%}" in result.line(result)
    late = gpu.measured(spec, time.monotonic())
    assert "not run: the time is up" in late.line(result)


@pytest.mark.slow
@pytest.mark.parametrize("names", ["tiny/bf16/eager,tiny/fp32/compile+alloc"])
def test_contenders_train_and_are_compared(names: str, tmp_path: Path):
    record = tmp_path / "figures.json"
    done = run(
        *("bench_train.py", "--only", names, "--rounds", "2", "--steps", "2"),
        *("--json", str(record)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(record.read_text())["results"]
    assert [result["name"] for result in results] == names.split(",")
    for result in results:
        assert not result["problem"], result["problem"]
        assert len(result["ratios"]) == 2
