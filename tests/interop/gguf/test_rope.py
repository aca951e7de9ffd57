from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.rope import LLAMA3, llama3_factors, rope_scaling_entries
from jaxdist.ops.rope import rope_table

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
EXACT = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
    },
    LLAMA3_SCALING,
    {
        "rope_type": "longrope",
        "short_factor": [1 + i / 64 for i in range(16)],
        "long_factor": [1.5 + i for i in range(16)],
        "original_max_position_embeddings": 64,
        "attention_factor": 1.25,
    },
]
# The same angles in other words.
EQUAL = [
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.3},
    LLAMA3_SCALING | {"low_freq_factor": 2.0, "high_freq_factor": 8.0, "factor": 8.0},
    LLAMA3_SCALING | {"high_freq_factor": 64.0, "original_max_position_embeddings": 5000},
    {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 16,
        "long_factor": [2.0] * 16,
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
]
SHAPE = {"head_dim": 32, "rope_theta": 500000.0}


def through_a_file(small, path: Path, scaling: dict[str, Any]):
    small.write(path, "llama", rope_scaling=scaling, **SHAPE)
    file = open_gguf(path)
    assert file.load("norm/weight").shape == (64,)  # factors count as no extra tensors
    return file.config


@pytest.mark.parametrize("scaling", EXACT, ids=lambda scaling: scaling["rope_type"])
def test_fields_survive(scaling: dict[str, Any], small, tmp_path: Path):
    config = through_a_file(small, tmp_path / "m.gguf", scaling)
    assert config == small.config("llama", rope_scaling=scaling, **SHAPE)


@pytest.mark.parametrize("scaling", EXACT + EQUAL, ids=lambda scaling: scaling["rope_type"])
def test_angles_survive(scaling: dict[str, Any], small, tmp_path: Path):
    config = through_a_file(small, tmp_path / "m.gguf", scaling)
    original = small.config("llama", rope_scaling=scaling, **SHAPE)
    for length in (40, 250):  # within the original context, and beyond
        positions = jnp.arange(length)[None]
        for ours, expected in zip(
            rope_table(config, positions), rope_table(original, positions), strict=True
        ):
            np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


def test_factors_of_llama3_divide_the_frequencies():
    """By the bounds of the published rule: fast ones are kept, slow ones divided by the factor."""
    numbers = {k: v for k, v in LLAMA3_SCALING.items() if k != "rope_type"}
    frequencies = 2 * np.pi / np.array([100.0, 2047, 4000, 8193, 1e6])  # by wave length in tokens
    factors = llama3_factors(frequencies, **numbers)
    np.testing.assert_allclose(factors[[0, 1, 3, 4]], [1, 1, 32, 32])
    assert 1 < factors[2] < 32


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.linspace(1, 8, 16), "those of Llama 3's RoPE scaling"),
        (np.full(16, np.nan), "factors that are not > 0"),
        (np.zeros(16), "factors that are not > 0"),
        (np.ones(8), r"has shape \(8,\), expected \(16,\)"),
    ],
)
def test_other_factors_are_refused(
    factors: np.ndarray, message: str, small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entries = ({}, {LLAMA3: factors.astype(np.float32)})
    monkeypatch.setattr(
        "jaxdist.interop.gguf.rope.rope_scaling_entries", lambda config: entries, raising=True
    )
    monkeypatch.setattr("jaxdist.interop.gguf.write.quantize", _stored)
    with pytest.raises(UsageError, match=f"m.gguf: tensor '{LLAMA3}' .*{message}"):
        through_a_file(small, tmp_path / "m.gguf", {"rope_type": "linear", "factor": 1.0})


def _stored(rows: np.ndarray, block_type: Any, name: str) -> np.ndarray:
    """Without the check of what may be written."""
    return np.ascontiguousarray(rows, np.float32).view(np.uint8)


def test_factors_of_one_are_no_scaling(small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    entries = ({}, {LLAMA3: np.ones(16, np.float32)})
    monkeypatch.setattr("jaxdist.interop.gguf.rope.rope_scaling_entries", lambda config: entries)
    config = through_a_file(small, tmp_path / "m.gguf", {"rope_type": "linear", "factor": 1.0})
    assert config.rope_scaling is None


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0, "truncate": False},
    ],
)
def test_what_gguf_cannot_say_is_refused(scaling: dict[str, Any], small):
    with pytest.raises(UsageError, match="has no form in GGUF"):
        rope_scaling_entries(small.config("llama", rope_scaling=scaling))
