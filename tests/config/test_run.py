from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from jaxdist.config import OptimizerConfig, RunConfig, TrainConfig, UsageError


def test_output_dir_follows_the_name() -> None:
    assert RunConfig(name="small").run_dir == Path("runs/small")
    assert RunConfig(name="small", output_dir="/tmp/x").run_dir == Path("/tmp/x")
    assert RunConfig(output_dir="~/x").run_dir == Path.home() / "x"  # as all other paths


def test_warm_up_and_decay_follow_the_steps() -> None:
    train = TrainConfig(steps=200)
    optimizer = RunConfig(train=train).optimizer
    assert (optimizer.warmup_steps, optimizer.decay_steps) == (10, None)
    wsd = RunConfig(train=train, optimizer=OptimizerConfig(schedule="wsd")).optimizer
    assert (wsd.warmup_steps, wsd.decay_steps) == (10, 20)
    assert RunConfig(train=TrainConfig(steps=1)).optimizer.warmup_steps == 0


def test_set_warm_up_stays() -> None:
    assert RunConfig(optimizer=OptimizerConfig(warmup_steps=0)).optimizer.warmup_steps == 0


def test_frozen_and_hashable() -> None:
    config = RunConfig()
    assert hash(config) == hash(RunConfig()) and config == RunConfig()
    with pytest.raises(FrozenInstanceError):
        config.seed = 1  # type: ignore[misc]
    assert replace(config, seed=1).seed == 1


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"name": ""}, "name"),
        ({"mesh": "2x2"}, "mesh"),
        ({"mesh": 8}, "mesh"),
        ({"resume": "maybe"}, "auto, must, never"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**32}, "seed"),
        ({"simulate": "yes"}, "simulate"),
        ({"dry_run": 1}, "dry_run"),
        ({"output_dir": 3}, "output_dir"),
    ],
)
def test_refused(fields: dict, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        RunConfig(**fields)
