from pathlib import Path
from typing import Any

import pytest

from jaxdist.config import RunConfig, UsageError
from jaxdist.config.layers import build, load, read_layer, save_config, to_yaml
from jaxdist.config.presets import preset_names

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_of_the_repository(path: Path, tmp_path: Path) -> None:
    config = load(path)
    assert config.name == path.stem
    saved = tmp_path / "run" / "config.yaml"
    save_config(config, saved)
    assert load(saved) == config and list(saved.parent.iterdir()) == [saved]


def test_a_config_that_cannot_be_saved_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(UsageError, match="config.yaml cannot be written: Is a directory"):
        save_config(build([{}]), tmp_path / "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("preset", preset_names())
def test_presets_round_trip(preset: str, tmp_path: Path) -> None:
    config = build([{"model": {"preset": preset, "num_hidden_layers": 2}}])
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path) == config


def test_later_layers_win_field_by_field() -> None:
    low = {"train": {"steps": 5, "sequence_length": 8}, "seed": 1}
    config = build([low, {"train": {"steps": 7}, "seed": 2}])
    assert (config.train.steps, config.train.sequence_length, config.seed) == (7, 8, 2)


def test_fields_over_a_preset_over_a_file() -> None:
    shape = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rope_theta": 77.0,
    }
    chosen = build([{"model": shape}, {"model": {"preset": "llama3_8b", "hidden_size": 2048}}])
    assert chosen.model.num_attention_heads == 32 and chosen.model.hidden_size == 2048
    assert chosen.model.rope_theta == 500000.0, "the file's shape must not leak into the preset's"
    assert build([{"model": shape}, {"model": {"hidden_size": 32}}]).model.rope_theta == 77.0


def test_nothing_is_the_default() -> None:
    assert build([]) == RunConfig()
    assert build([{"model": {"rope_theta": 5.0}}]).model.preset == "tiny"


def test_part_of_a_shape_is_not_enough() -> None:
    with pytest.raises(UsageError, match="model needs hidden_size, intermediate_size"):
        build([{"model": {"vocab_size": 9, "num_hidden_layers": 2, "num_attention_heads": 1}}])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("optimizer: {learning_rat: 1}", "optimizer.learning_rat is not a key; did you mean opt"),
        ("optimiser: {}", "optimiser is not a key; did you mean optimizer"),
        ("learning_rate: 1", "did you mean optimizer.learning_rate"),
        ("train: 5", "train must be a mapping"),
        ("train:", "train must be a mapping"),
        ("train: {steps: many}", "train.steps='many'"),
        ("train: {steps: 1.5}", "train.steps=1.5"),
        ("data: {sources: [{pth: a}]}", "did you mean path"),
        ("data: {sources: [{path: synthetic, field: a}]}", "synthetic rows have no field"),
        ("model: {preset: lama3_8b}", "did you mean llama3_8b"),
    ],
)
def test_refused(text: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=word):
        load(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nonexistent.yaml cannot be read: No such file"):
        read_layer("/nonexistent.yaml")
    with pytest.raises(UsageError, match="directory"):
        read_layer(tmp_path)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read_layer(tmp_path / "b.yaml")


def test_numbers_with_exponents(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("optimizer: {learning_rate: 3e-4}\nprofile: {steps: 10:12}")
    config: Any = load(path)
    assert config.optimizer.learning_rate == 3e-4 and config.profile.steps == "10:12"
