import dataclasses

import pytest

from jaxdist.config import DataConfig, OptimizerConfig, TrainConfig
from jaxdist.training.resume import differences, new_decay, new_learning

SAVED = {
    "seed": 1,
    "mesh": "4x1x2",
    "model": {"preset": None, "hidden_size": 64, "rope_scaling": {"factor": 2.0}},
    "data": dataclasses.asdict(DataConfig(sources=("a.txt",))),
    "optimizer": dataclasses.asdict(OptimizerConfig()),
    "train": dataclasses.asdict(TrainConfig(steps=10)),
    "parallel": {"zero": 1, "schedule": "1f1b"},
}


def changed(section: str, field: str, value: object) -> dict:
    return {**SAVED, section: {**SAVED[section], field: value}}


def test_an_equal_config_may_resume():
    assert differences(SAVED, SAVED) == []


@pytest.mark.parametrize(
    ("section", "field", "value", "line"),
    [
        ("model", "hidden_size", 128, "model.hidden_size: 64 saved, 128 asked"),
        ("data", "sources", ["b.txt"], "data.sources: ['a.txt'] saved, ['b.txt'] asked"),
        ("train", "global_batch_size", 7, "train.global_batch_size: 16 saved, 7 asked"),
        ("train", "sequence_length", 99, "train.sequence_length: 256 saved, 99 asked"),
        ("optimizer", "name", "lion", "optimizer.name: adamw saved, lion asked"),
    ],
)
def test_another_model_stream_or_optimizer_is_shown(section, field, value, line):
    assert differences(SAVED, changed(section, field, value)) == [line]


def test_another_seed_is_shown():
    assert differences(SAVED, {**SAVED, "seed": 2}) == ["seed: 1 saved, 2 asked"]


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("parallel", "zero", 3),
        ("train", "steps", 20),
        ("train", "stop_after", 5),
        ("optimizer", "learning_rate", 0.1),
        ("data", "cache_dir", "/elsewhere"),
        ("data", "tokenizer", "/elsewhere/tokenizer.json"),
        ("model", "preset", "tiny"),
    ],
)
def test_what_a_run_may_change(section, field, value):
    assert differences(SAVED, {**changed(section, field, value), "mesh": "1x1x1"}) == []


def test_text_to_validate_on_may_change_but_not_what_is_left_to_train_on():
    def on(*sources: str, fraction: float = 0.05) -> dict:
        data = DataConfig(
            sources=("a.txt",), validation_sources=sources, validation_fraction=fraction
        )
        return {**SAVED, "data": dataclasses.asdict(data)}

    assert differences(on("b.txt"), on("c.txt")) == []
    assert differences(on("b.txt"), on("b.txt", fraction=0.3)) == []
    assert differences(on("b.txt"), on(fraction=0)) == []
    assert differences(on(fraction=0), on("b.txt", fraction=0)) == []
    assert differences(on(), on("b.txt")) == [
        "data.validation_sources: [] saved, ['b.txt'] asked",
    ]
    assert differences(on("b.txt"), on()) == ["data.validation_sources: ['b.txt'] saved, [] asked"]
    assert differences(on(), on(fraction=0.3)) == [
        "data.validation_fraction: 0.05 saved, 0.3 asked",
    ]


def test_a_field_that_the_saved_config_does_not_know_counts_as_unchanged():
    assert differences(SAVED, changed("model", "new_field", 3)) == []


def test_every_difference_is_listed():
    current = {**changed("model", "hidden_size", 128), "seed": 9}
    assert len(differences(SAVED, current)) == 2


def test_another_number_of_steps_moves_the_decay_and_that_is_said():
    longer = changed("train", "steps", 20)
    line = new_decay(SAVED, longer)
    assert line.startswith("train.steps: 10 saved, 20 asked") and "cosine schedule of 20" in line
    constant = {**SAVED["optimizer"], "schedule": "constant"}
    assert new_decay(SAVED, {**longer, "optimizer": constant})  # whose warm-up is a share of it
    constant["warmup_steps"] = 2
    assert new_decay(SAVED, {**longer, "optimizer": constant}) == new_decay(SAVED, SAVED) == ""


def test_another_learning_rate_or_format_is_said_and_another_mesh_is_not():
    current = changed("optimizer", "learning_rate", 1e-5)
    current |= {"mesh": "1x1x1", "precision": {"policy": "fp32"}}
    saved = {**SAVED, "precision": {"policy": "bf16", "of_old": 1}}
    assert new_learning(saved, current) == (
        "optimizer.learning_rate: 0.0003 saved, 1e-05 asked; "
        "precision.policy: bf16 saved, fp32 asked; as asked from here on"
    )
    assert new_learning(SAVED, {**SAVED, "mesh": "1x1x1"}) == ""
