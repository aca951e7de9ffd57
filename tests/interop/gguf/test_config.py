from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.architectures import ARCHITECTURES
from jaxdist.interop.gguf.config import config_entries, read_config
from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.header import read_header


def with_keys(path: Path, keys: dict[str, Any], leave_out: tuple[str, ...] = ()) -> Path:
    """A copy of a file with some metadata replaced, left out or added."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_name("changed.gguf"), "llama")
    values = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    writer.kv_data[0].clear()
    for key, value in {**values, **keys}.items():
        if key not in leave_out:
            add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}
            getattr(writer, f"add_{add[type(value)]}")(key, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_name("changed.gguf")


@pytest.fixture
def plain(small, tmp_path: Path) -> Path:
    small.write(tmp_path / "plain.gguf")
    return tmp_path / "plain.gguf"


@pytest.mark.parametrize(
    "fields",
    [
        {"num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        {"sliding_window": 17, "max_position_embeddings": 131072, "tie_word_embeddings": False},
        {"vocab_size": 97, "num_hidden_layers": 3, "intermediate_size": 32},
    ],
)
def test_every_field_survives(fields: dict[str, Any], small, tmp_path: Path):
    small.write(tmp_path / "m.gguf", "llama", **fields)
    assert open_gguf(tmp_path / "m.gguf").config == small.config("llama", **fields)


def test_keys_are_llama_cpps(small):
    config = small.config("qwen3", sliding_window=5)
    assert config_entries(ARCHITECTURES["qwen3"], config) == {
        "qwen3.vocab_size": 96,
        "qwen3.context_length": 256,
        "qwen3.embedding_length": 64,
        "qwen3.feed_forward_length": 96,
        "qwen3.block_count": 2,
        "qwen3.attention.head_count": 4,
        "qwen3.attention.head_count_kv": 2,
        "qwen3.attention.key_length": 32,
        "qwen3.attention.value_length": 32,
        "qwen3.attention.layer_norm_rms_epsilon": 1e-5,
        "qwen3.attention.sliding_window": 5,
        "qwen3.rope.dimension_count": 32,
        "qwen3.rope.freq_base": 10000.0,
    }


def test_what_may_be_left_out(plain: Path):
    optional = ("vocab_size", "attention.key_length", "attention.value_length")
    optional += ("rope.dimension_count", "rope.freq_base")
    path = with_keys(plain, {}, leave_out=tuple(f"llama.{key}" for key in optional))
    assert read_config(read_header(path)) == read_config(read_header(plain))


def test_heads_of_each_layer_may_be_listed_where_equal(plain: Path):
    path = with_keys(plain, {"llama.attention.head_count_kv": [2, 2]})
    assert read_config(read_header(path)).num_key_value_heads == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"general.architecture": "lama"},
            "general.architecture: 'lama' is not one of .*mean llama",
        ),
        ({"general.architecture": "mamba"}, "'mamba' is not one of qwen3"),
        ({"llama.context_length": "long"}, "llama.context_length: 'long' is not a whole number"),
        ({"llama.context_length": True}, "llama.context_length: True is not a whole number"),
        ({"llama.rope.freq_base": "x"}, "llama.rope.freq_base: 'x' is not a number"),
        ({"llama.rope.freq_base": float("nan")}, "model.rope_theta=nan must be a finite"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count: is not head_dim=16"),
        ({"llama.attention.value_length": 8}, "attention.value_length: is not head_dim=16"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv: differs from layer to layer"),
        ({"llama.attention.head_count": 0}, "model.num_attention_heads=0"),
        ({"llama.attention.head_count_kv": 3}, "model.num_key_value_heads=3 does not divide"),
        ({"llama.block_count": 2**31}, "num_hidden_layers=2147483648 is more than the file's"),
        ({"llama.embedding_length": 2**30}, "hidden_size=1073741824 is more than the file's"),
        ({"llama.embedding_length": 32}, "'token_embd.weight' has shape .*, but the metadata ask"),
        ({"llama.expert_count": 8}, "llama.expert_used_count: is missing"),
        ({"llama.expert_shared_count": 1}, "expert_shared_count: 1 asks for what no model here"),
        ({"llama.expert_gating_func": 2}, "llama.expert_gating_func: 2 asks for what no model"),
        ({"llama.final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 asks for"),
        ({"llama.rope.scaling.type": "fancy"}, "rope.scaling.type: 'fancy' is not one of"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.factor: is missing"),
        ({"split.count": 3}, "split.count: the model lies in 3 files"),
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template: 3 is not a string"),
    ],
)
def test_what_is_refused_is_named(keys: dict[str, Any], message: str, plain: Path):
    path = with_keys(plain, keys)
    with pytest.raises(UsageError, match=f"^{path}: .*{message}") as caught:
        file = open_gguf(path)
        assert file.chat_template is None and file.tensor_names
    assert "\n" not in str(caught.value)


def test_a_missing_key_is_named(plain: Path):
    path = with_keys(plain, {}, leave_out=("llama.context_length",))
    with pytest.raises(UsageError, match="changed.gguf: llama.context_length: is missing"):
        read_config(read_header(path))


def test_neutral_settings_are_fine(plain: Path):
    keys = {"llama.expert_count": 0, "llama.logit_scale": 1.0, "llama.attention.causal": True}
    assert read_config(read_header(with_keys(plain, keys))) == read_config(read_header(plain))
