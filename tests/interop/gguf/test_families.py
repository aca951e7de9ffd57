"""Folders that transformers wrote, through a GGUF file and back: every weight as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.write import write_gguf
from jaxdist.interop.huggingface.folder import CONFIG, open_huggingface
from jaxdist.interop.huggingface.safetensors_file import open_safetensors
from jaxdist.interop.huggingface.write import write_huggingface
from tests.interop.huggingface.test_families import DEEPSEEK, EXPERTS, GEMMA, LONGROPE, YARN

LONG = LONGROPE | {"attention_factor": 1.25}
HEADS = GEMMA | {"query_pre_attn_scalar": 16}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("mistral", {"sliding_window": 8}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 16}),
    ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 16}),
    ("olmo2", {}),
    ("gemma2", HEADS),
    ("gemma3_text", HEADS | {"sliding_window_pattern": 3}),
    ("gpt2", {"n_inner": 48}),
    ("mixtral", {"num_local_experts": 5}),
    ("qwen3_moe", EXPERTS | {"num_experts": 6, "norm_topk_prob": True, "head_dim": 8}),
    ("deepseek_v3", DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.8}}),
    ("deepseek_v3", DEEPSEEK | {"q_lora_rank": None}),
]
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3"}
ARCHITECTURES |= {"qwen3_moe": "qwen3moe", "deepseek_v3": "deepseek2"}


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_through_a_file_and_back(model_type: str, fields: dict, foreign, tmp_path: Path):
    special = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    source = open_huggingface(foreign(model_type, **special | fields))
    path, folder = tmp_path / "m.gguf", tmp_path / "back"
    write_gguf(path, source.config, source.weights(), gguf_type="f32", preferred=model_type)
    file = open_gguf(path)
    assert file.architecture.name == ARCHITECTURES.get(model_type, model_type)
    origin = {CONFIG: (source.folder / CONFIG).read_bytes()}
    write_huggingface(folder, file.config, file.weights(), companions=origin)
    before, after = open_safetensors(source.folder), open_safetensors(folder)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        exact = "norm" not in name or not model_type.startswith("gemma")  # see test_gguf.py
        atol = 0 if exact else 2.0**-22
        np.testing.assert_allclose(after[name], tensor, rtol=0, atol=atol, err_msg=name)
    back = open_huggingface(folder).config
    for name in ("initializer_range", "router_aux_loss_coef"):  # only training knows them
        back = replace(back, **{name: getattr(source.config, name)})
    assert back == source.config
