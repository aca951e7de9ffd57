import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import UsageError
from jaxdist.config.yaml_text import read_yaml, write_yaml

# PyYAML folds U+0085, a line end of the terminals of old, when it writes Unicode unescaped.
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x85"), max_size=12)
TRAPS = st.sampled_from(["1e-3", "10:12", "no", "null", "~", "0x10", "012", ".inf", "2026-01-01"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | TRAPS
NAMES = st.text("abc_", min_size=1, max_size=4)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(NAMES, SCALARS, max_size=3)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_round_trip(values: dict[str, Any]) -> None:
    assert read_yaml(write_yaml(values), "here") == values


@given(st.dictionaries(NAMES, st.text("0123456789.:exno-+_", max_size=6)))
def test_text_stays_text_for_other_readers(values: dict[str, str]) -> None:
    assert yaml.safe_load(write_yaml(values)) == values


def test_scalars_as_people_mean_them() -> None:
    text = "a: 1e-3\nb: 10:12\nc: no\nd: 1.5\ne: true\nf:\ng: -3\nh: 2E+4\ni: .nan\nj: v1.2"
    values = read_yaml(text, "here")
    assert math.isnan(values.pop("i"))
    assert values == {
        **{"a": 1e-3, "b": "10:12", "c": "no", "d": 1.5, "e": True},
        **{"f": None, "g": -3, "h": 2e4, "j": "v1.2"},
    }


def test_empty_is_empty() -> None:
    assert read_yaml("# nothing\n", "here") == {}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: 1\nb: 2\na: 3", "'a' stands twice, again in line 3"),
        ("a: {b: 1, b: 2}", "'b' stands twice"),
        ("- 1", "mapping"),
        ("1: 2", "mapping"),
        ("a: [1", "not valid YAML"),
        ("a: !!python/object:os.system {}", "not valid YAML"),
        ("? [a, b]\n: 1", "not valid YAML"),
        ("a: " + "9" * 5000, "not valid YAML"),
    ],
)
def test_refused_with_its_place(text: str, word: str) -> None:
    with pytest.raises(UsageError, match="(?s)here.*" + word):
        read_yaml(text, "here")
