import math

import pytest

from jaxdist.config import ModelConfig, UsageError
from jaxdist.config.presets import check_preset, preset_names
from jaxdist.interop.leaves import leaf_shapes

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
    "gpt2": 124_439_808,
    "phi3_mini": 3_821_079_552,
    "olmo2_7b": 7_298_617_344,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_size(name: str) -> None:
    shapes = leaf_shapes(ModelConfig.from_preset(name)).values()
    assert sum(map(math.prod, shapes)) == PARAMETERS[name]


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
