"""config.json to ModelConfig and back; what we cannot express is refused by name."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config import ModelConfig, UsageError
from jaxdist.interop.huggingface.config import read_config, stored_dtype, write_config

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SHAPE: dict[str, Any] = {key: value for key, value in BASE.items() if isinstance(value, int)}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


def read(**changes) -> ModelConfig:
    return read_config(BASE | changes, "config.json")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 5e5},
        {"rope_scaling": YARN, "max_position_embeddings": 64, "tie_word_embeddings": True},
        {"qkv_bias": True},
        {"qkv_bias": True, "sliding_window": 8},
        {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True},
        {"qk_norm": True},
        {"qk_norm": True, "sliding_window": 8, "qkv_bias": True, "attention_output_bias": True},
        {"sliding_window": 8},
    ],
)
def test_round_trip(fields):
    config = ModelConfig(**SHAPE, **fields)
    assert read_config(write_config(config, "float32"), "config.json") == config


ODD = [None, True, -1, 0, 2, 2.5, "x", "4", [], {}, [1], [[]], [{}], {"a": 1}, 10**12, 1e308]
ODD += [["sliding_attention", "full_attention"], {"full_attention": {}, "sliding_attention": 3}]
EACH = {
    "LlamaForCausalLM": {"rope_scaling": YARN},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 4},
    "Phi3ForCausalLM": {"original_max_position_embeddings": 16},
    "Gemma2ForCausalLM": {"attn_logit_softcapping": 2.0},
    "Gemma3ForCausalLM": {"rope_local_base_freq": 100.0, "sliding_window": 4},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 8},
    "DeepseekV3ForCausalLM": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
}


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_values_of_any_kind_are_read_or_refused_in_one_line(data):
    architecture = data.draw(st.sampled_from(sorted(EACH)))
    values = BASE | EACH[architecture] | {"architectures": [architecture]}
    values |= {"layer_types": None, "sliding_window_pattern": None, "rope_parameters": None}
    names = st.sampled_from(sorted(values))
    changed = data.draw(st.dictionaries(names, st.sampled_from(ODD), min_size=1, max_size=3))
    try:
        read_config(values | changed, "config.json")
    except UsageError as refused:
        assert str(refused).startswith("config.json") and "\n" not in str(refused)


def test_the_architecture_it_came_with_is_kept():
    config = ModelConfig(**SHAPE)
    origin = {"architectures": ["MistralForCausalLM"], "eos_token_id": [1, 2]}
    written = write_config(config, "bfloat16", origin)
    assert written["architectures"] == ["MistralForCausalLM"]
    assert written["sliding_window"] is None and written["eos_token_id"] == [1, 2]
    biased = ModelConfig(**SHAPE, qkv_bias=True)
    assert write_config(biased, "float32", origin)["architectures"] == ["Qwen2ForCausalLM"]
    assert stored_dtype(written) == "bfloat16"


def test_what_config_json_leaves_out():
    assert read().rms_norm_eps == 1e-6 and read().num_key_value_heads == 4
    mistral = read(architectures=["MistralForCausalLM"], num_attention_heads=8)
    assert (mistral.num_key_value_heads, mistral.sliding_window) == (8, 4096)
    qwen3 = read(architectures=["Qwen3ForCausalLM"], num_key_value_heads=2)
    assert qwen3.head_dim == 128 and qwen3.qk_norm
    assert read(architectures=None) == read()


def test_both_spellings_of_rope():
    new = read(rope_parameters=YARN | {"rope_theta": 5e5})
    assert new == read(rope_scaling=YARN, rope_theta=5e5)
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope_theta == 5e5
    legacy = read(rope_scaling={"type": "linear", "factor": 2.0})
    assert legacy.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_windows_of_qwen():
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 8}
    assert read(**qwen).sliding_window is None
    assert read(**qwen, use_sliding_window=True, max_window_layers=0).sliding_window == 8
    assert read(**qwen, use_sliding_window=True, max_window_layers=2).sliding_window is None
    with pytest.raises(UsageError, match="only some of the 2 layers have a sliding window"):
        read(**qwen, use_sliding_window=True, max_window_layers=1)


def test_windows_of_gemma():
    gemma = {"architectures": ["Gemma2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 8}

    def pattern(kinds: str | None, **more) -> tuple[int | None, int | None]:
        named = {"s": "sliding_attention", "f": "full_attention"}
        listed = {} if kinds is None else {"layer_types": [named[kind] for kind in kinds]}
        model = read(**gemma, **listed, **more)
        return model.sliding_window, model.sliding_window_pattern

    assert pattern(None) == (8, 2)
    assert pattern(None, sliding_window_pattern=3) == (8, 3)
    assert pattern("sssf") == (8, 4)
    assert pattern("ssss") == (8, None)
    assert pattern("ffff") == (None, None)
    with pytest.raises(UsageError, match="layer_types is none of the patterns"):
        pattern("fsfs")


def test_rope_of_local_layers():
    gemma = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 8}
    local = {"rope_type": "default", "rope_theta": 100.0}
    linear = {"rope_type": "linear", "factor": 2.0}
    both = {"full_attention": linear | {"rope_theta": 5e5}, "sliding_attention": local}
    model = read(**gemma, rope_parameters=both)
    assert (model.rope_theta, model.rope_local_base_freq) == (5e5, 100.0)
    assert model.rope_scaling == linear
    assert read(**gemma).rope_local_base_freq == 10000.0
    scaled = {"full_attention": linear, "sliding_attention": linear}
    with pytest.raises(UsageError, match="differs between layers"):
        read(**gemma, rope_parameters=scaled)


def test_keys_of_gpt2():
    values = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = read_config({"architectures": ["GPT2LMHeadModel"], **values}, "config.json")
    assert (model.hidden_size, model.intermediate_size) == (32, 128)
    assert (model.max_position_embeddings, model.position_embedding) == (1024, "learned")
    with pytest.raises(UsageError, match="n_embd, n_inner missing"):
        del values["n_embd"]
        read_config({"architectures": ["GPT2LMHeadModel"], **values}, "config.json")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2}, "sparse_step=2"),
        ({"architectures": ["LlamaForCausalML"]}, "did you mean LlamaForCausalLM"),
        ({"architectures": ["A", "B"]}, "must name one architecture"),
        ({"architectures": None, "model_type": "bert"}, "model_type='bert'"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "rope_type='spiral' is not one"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type linear needs factor"),
        ({"rope_scaling": YARN | {"mrope_section": [1]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": 3}, "rope_scaling must be a mapping"),
        ({"rope_parameters": {"full_attention": {}}}, "differs between layers"),
        ({"hidden_act": "relu"}, "hidden_act=relu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config=.*gptq"),
        ({"hidden_size": "32"}, "model.hidden_size='32' must be a whole number"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide"),
        ({"vocab_size": -1}, "vocab_size=-1"),
    ],
)
def test_what_we_cannot_express_is_named(changes, message):
    with pytest.raises(UsageError, match=f"^config.json: .*{message}"):
        read(**changes)


def test_a_missing_size_is_named():
    values = {key: value for key, value in BASE.items() if key != "hidden_size"}
    with pytest.raises(UsageError, match="config.json: hidden_size missing"):
        read_config(values, "config.json")


def test_models_without_a_family_are_named():
    config = ModelConfig(**SHAPE, norm="layernorm", mlp="gelu")
    with pytest.raises(UsageError, match="no architecture of .* norm=layernorm, mlp=gelu"):
        write_config(config, "float32")
