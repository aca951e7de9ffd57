from typing import Any

import pytest

from jaxdist.config import UsageError
from jaxdist.config.rope_scaling import checked

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "attention_factor": None},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        LLAMA3,
    ],
)
def test_accepted_unchanged(scaling: dict[str, Any]) -> None:
    kept = checked(scaling, head_dim=16)
    assert kept is not None and set(kept) == set(scaling)
    assert kept["rope_type"] == scaling["rope_type"]


def test_old_name_of_the_kind() -> None:
    assert checked({"type": "linear", "factor": 2.0}, 16) == {"rope_type": "linear", "factor": 2.0}


def test_default_is_none() -> None:
    assert checked({"rope_type": "default"}, 16) is None


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "ntk", "factor": 2.0}, "rope_type"),
        ({"factor": 2.0}, "rope_type"),
        ({"rope_type": "linear"}, "needs factor"),
        ({"rope_type": "linear", "factor": 0.5}, "at least 1"),
        ({"rope_type": "linear", "facto": 2.0, "factor": 2.0}, "did you mean factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "finite"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 8}, "head_dim/2"),
        ({"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0] * 8}, "short_factor"),
        ({**LLAMA3, "low_freq_factor": 4.0}, "less than"),
        ({**LLAMA3, "original_max_position_embeddings": None}, "original_max"),
        ("linear", "mapping"),
    ],
)
def test_refused(scaling: Any, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        checked(scaling, head_dim=16)
