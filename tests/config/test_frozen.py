import copy
import pickle
from dataclasses import asdict

import pytest

from jaxdist.config import ModelConfig
from jaxdist.config.frozen import FrozenDict, frozen, thawed

VALUES = {"a": [1, {"b": [2]}], "c": "x"}


def test_hash_and_equality() -> None:
    assert frozen(VALUES) == frozen(copy.deepcopy(VALUES))
    assert hash(frozen(VALUES)) == hash(frozen(dict(reversed(VALUES.items()))))


def test_thawed_is_the_opposite() -> None:
    assert thawed(frozen(VALUES)) == VALUES
    assert type(thawed(frozen(VALUES))) is dict


def test_nothing_changes_it() -> None:
    values = FrozenDict(VALUES)
    for change in (values.clear, values.popitem, lambda: values.update(a=1)):
        with pytest.raises(TypeError, match="frozen"):
            change()
    with pytest.raises(TypeError, match="frozen"):
        values["a"] = 1
    with pytest.raises(TypeError, match="frozen"):
        del values["a"]


def test_copies() -> None:
    values = FrozenDict(VALUES)
    assert pickle.loads(pickle.dumps(values)) == copy.deepcopy(values) == values
    assert asdict(ModelConfig.from_preset("llama3_405b"))["rope_scaling"]["factor"] == 8.0
