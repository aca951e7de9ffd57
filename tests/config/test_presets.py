import pytest

from jaxdist.config import ModelConfig, UsageError
from jaxdist.config.presets import check_preset, preset_names

# Parameters as published with the weights; of GPT-3 those of its shape without learned positions.
PARAMETERS = {
    "smollm2_135m": 134_515_008,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama_65b": 65_285_660_672,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "mistral_7b": 7_241_732_096,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_8b": 8_190_735_360,
    "gpt3_175b": 174_579_093_504,
}


def num_parameters(model: ModelConfig) -> int:
    d, f = model.hidden_size, model.intermediate_size
    q = model.num_attention_heads * model.head_dim
    kv = model.num_key_value_heads * model.head_dim
    attention = d * (q + 2 * kv) + q * d + model.qk_norm * 2 * model.head_dim
    attention += model.qkv_bias * (q + 2 * kv) + model.attention_output_bias * d
    up = 1 if model.mlp == "gelu" else 2
    mlp = (up + 1) * d * f + model.mlp_bias * (up * f + d)
    norm = d if model.norm == "rmsnorm" else 2 * d
    heads = 1 if model.tie_word_embeddings else 2
    layers = model.num_hidden_layers * (attention + mlp + 2 * norm)
    return heads * model.vocab_size * d + layers + norm


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_size(name: str) -> None:
    assert num_parameters(ModelConfig.from_preset(name)) == PARAMETERS[name]


def test_all_are_there() -> None:
    assert set(preset_names()) == {"tiny", *PARAMETERS}


def test_fields_on_top() -> None:
    model = ModelConfig.from_preset("llama3_8b", num_hidden_layers=8)
    assert (model.num_hidden_layers, model.hidden_size, model.preset) == (8, 4096, "llama3_8b")


@pytest.mark.parametrize("name", ["lama3_8b", "llama3-8b", "Llama3_8b"])
def test_unknown_names_the_nearest(name: str) -> None:
    with pytest.raises(UsageError, match="did you mean llama3_8b"):
        check_preset(name)


def test_not_a_text() -> None:
    with pytest.raises(UsageError, match="model.preset=3"):
        check_preset(3)
