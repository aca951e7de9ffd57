from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import ModelConfig, UsageError

TINY = ModelConfig.from_preset("tiny")


def test_heads_are_filled_in() -> None:
    model = ModelConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    assert (model.num_key_value_heads, model.head_dim) == (4, 16)


def test_head_dim_may_differ_from_the_quotient() -> None:
    assert replace(TINY, hidden_size=100, head_dim=32).head_dim == 32


@given(st.integers(1, 10**6), st.integers(1, 1024))
def test_padding_is_the_next_multiple(vocab_size: int, multiple: int) -> None:
    padded = replace(TINY, vocab_size=vocab_size, vocab_multiple=multiple).padded_vocab_size
    assert padded % multiple == 0 and 0 <= padded - vocab_size < multiple


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vocab_size": 0}, "vocab_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 100, "head_dim": 0}, "hidden_size=100"),
        ({"head_dim": 15}, "choose 16"),
        ({"num_key_value_heads": 3}, "choose it from 1, 2, 4, 8"),
        ({"num_key_value_heads": 16}, "num_key_value_heads=16"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"norm": "batchnorm"}, "rmsnorm"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"mlp": "swigluu"}, "did you mean swiglu"),
        ({"qkv_bias": 1}, "qkv_bias"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"rope_theta": 0.5}, "rope_theta"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"vocab_multiple": 0}, "vocab_multiple"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
    ],
)
def test_refused(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        replace(TINY, **changes)


def test_a_preset_by_its_name_alone_is_not_mistaken_for_a_shape() -> None:
    with pytest.raises(TypeError, match="hidden_size"):
        ModelConfig(preset="tiny")  # type: ignore[call-arg]


def test_hashable_with_a_rope_scaling() -> None:
    model = ModelConfig.from_preset("llama3_405b")
    assert model.rope_scaling is not None
    assert hash(model) == hash(ModelConfig.from_preset("llama3_405b"))
    with pytest.raises(TypeError):
        model.rope_scaling["factor"] = 2  # type: ignore[index]


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        (None, 1024),
        ({"rope_type": "linear", "factor": 4.0}, 4096),
        ({"rope_type": "dynamic", "factor": 2.5}, 2560),
        ({"rope_type": "yarn", "factor": 4.0}, 1024),
    ],
)
def test_longest_sequence(scaling: dict[str, Any] | None, length: int) -> None:
    assert replace(TINY, rope_scaling=scaling).max_sequence_length == length
