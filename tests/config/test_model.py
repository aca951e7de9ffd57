import re
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


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 6}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm_order": "before"}, "norm_order='before' is not one of pre, post, sandwich"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping=0 must be greater than 0"),
        ({"sliding_window_pattern": 2}, "set --model.sliding_window"),
        ({"sliding_window": 4, "sliding_window_pattern": 1}, "must be at least 2"),
        ({"n_shared_experts": 1}, "needs experts; set --model.num_experts"),
        ({**EXPERTS, "mlp": "gelu"}, "has no form with experts"),
        ({**EXPERTS, "n_group": 3}, "n_group=3 must divide num_experts=8"),
        ({**EXPERTS, "n_group": 8, "num_experts_per_tok": 1}, "choose at most 4"),
        ({**EXPERTS, "n_group": 4, "num_experts_per_tok": 3}, "more than the 2 experts"),
        ({**EXPERTS, "first_k_dense_replace": 2}, "leaves none of the 2 layers"),
        ({"q_lora_rank": 4}, "belongs to latent attention; set --model.kv_lora_rank"),
        ({**LATENT, "v_head_dim": 0}, "v_head_dim=0, which latent attention"),
        ({**LATENT, "qk_rope_head_dim": 3}, "qk_rope_head_dim=3 must be even"),
        ({**LATENT, "qk_norm": True}, "qk_norm=true has no form with latent attention"),
    ],
)
def test_parts_that_do_not_go_together(fields, message):
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    with pytest.raises(UsageError, match=re.escape(message)):
        ModelConfig(**shape, num_hidden_layers=2, num_attention_heads=4, **fields)


def test_layers_with_and_without_a_window():
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 4, "num_attention_heads": 4}
    for fields, local in (
        ({}, [False] * 4),
        ({"sliding_window": 4}, [True] * 4),
        ({"sliding_window": 4, "sliding_window_pattern": 2}, [True, False] * 2),
    ):
        assert list(map(ModelConfig(**shape, **fields).is_local, range(4))) == local
