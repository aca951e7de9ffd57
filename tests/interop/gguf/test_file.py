from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.write import TYPES, write_gguf
from jaxdist.quantization.gguf_blocks import unpack
from tests.interop.conftest import GGUF_MODELS

# What transformers does not take from the file.
READ_BY_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "phi3": {},
    "gemma2": {
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 32,
    },
    "gemma3": {
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        },
    },
    "gpt2": {"n_positions": 256, "n_inner": 96, "vocab_size": 96},
    "qwen3moe": {"norm_topk_prob": True, "head_dim": 32, "moe_intermediate_size": 32},
}


def rewritten(path: Path, target: Path, change) -> None:
    """A copy of a file made by `change(writer, reader)`, whose tensors it decides about."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, found.contents(), found.types[0])
    change(writer, reader)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("model", GGUF_MODELS)
def test_fp32_round_trip_is_exact(model: str, small, tmp_path: Path):
    path = tmp_path / "m.gguf"
    weights = small.write(path, model)
    file = open_gguf(path)
    assert file.config == small.config(model)
    assert set(file.types) == {"F32"} and file.chat_template is None
    again = list(file.weights())
    assert [w[:2] for w in again] == [w[:2] for w in weights]
    assert file.tensor_names == tuple(dict.fromkeys(name for name, _, _ in weights))
    for (name, layer, ours), (_, _, original) in zip(again, weights, strict=True):
        np.testing.assert_array_equal(ours, original, err_msg=f"{name} {layer}")


@pytest.mark.slow
@pytest.mark.parametrize("model", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same_model(model: str, small, tmp_path: Path):
    """An independent reader of GGUF: names, orientation, and the order of q's and k's rows."""
    small.write(tmp_path / "m.gguf", model)
    file = open_gguf(tmp_path / "m.gguf")
    tokens = np.random.default_rng(7).integers(0, file.config.vocab_size, (2, 12))
    fields = {"pad_token_id": 0, "eos_token_id": 1, **READ_BY_TRANSFORMERS[model]}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32, **fields
    )
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    ours = small.logits(file, tokens)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("gguf_type", "error"), [("f16", 5e-4), ("bf16", 4e-3), ("q8_0", 8e-3), ("q4_0", 0.13)]
)
def test_other_types_are_near(gguf_type: str, error: float, small, tmp_path: Path):
    """Errors are relative to the largest weight of a block; vectors stay exact."""
    weights = small.write(tmp_path / "m.gguf", "qwen2", gguf_type)
    file = open_gguf(tmp_path / "m.gguf")
    assert set(file.types) == {"F32", TYPES[gguf_type][0]}
    for (name, _, ours), (_, _, original) in zip(file.weights(), weights, strict=True):
        largest = 0 if original.ndim == 1 else np.abs(original).max()
        np.testing.assert_allclose(ours, original, rtol=0, atol=error * largest, err_msg=name)


def test_rows_of_no_whole_blocks_become_f16(small, tmp_path: Path):
    small.write(tmp_path / "m.gguf", "llama", "q8_0", intermediate_size=72)
    types = {name: info.type.name for name, info in tensors(tmp_path / "m.gguf").items()}
    assert types["blk.0.ffn_down.weight"] == "F16" and types["blk.0.ffn_up.weight"] == "Q8_0"


def tensors(path: Path) -> dict:
    return dict(open_gguf(path).header.tensors)


@pytest.mark.parametrize(
    ("model", "gguf_type"),
    [("llama", "q8_0"), pytest.param("phi3", "q4_0", marks=pytest.mark.slow)],
)
def test_packed_equals_dequantized(model: str, gguf_type: str, small, tmp_path: Path):
    """Also where the rows of q and k change places, or a tensor holds several of ours."""
    small.write(tmp_path / "m.gguf", model, gguf_type)
    file = open_gguf(tmp_path / "m.gguf")
    assert file.packed_type("norm/weight") is None
    for name in file.tensor_names:
        layer = 1 if name.startswith("layers/") else None
        if "norm" in name:
            continue
        assert file.packed_type(name, layer) == TYPES[gguf_type][0]
        plain = file.load(name, layer)
        ours = plain.T if name in ("embed_tokens", "lm_head") else plain
        np.testing.assert_array_equal(unpack(file.load_packed(name, layer)), ours)


def test_gains_survive_a_file_in_a_file(small, tmp_path: Path):
    """Gemma's, of which a file holds 1 + ours: from a file and back every bit stays."""
    config = small.config("gemma3")
    rng = np.random.default_rng(0)
    weights = [
        (n, i, rng.uniform(-0.5, 3, w.shape).astype(np.float32) if "norm" in n else w)
        for n, i, w in small.weights(config)
    ]
    write_gguf(tmp_path / "a.gguf", config, weights, gguf_type="f32", name="m")
    first = open_gguf(tmp_path / "a.gguf")
    write_gguf(tmp_path / "b.gguf", first.config, first.weights(), gguf_type="f32", name="m")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    for (name, _, ours), (_, _, original) in zip(first.weights(), weights, strict=True):
        np.testing.assert_allclose(ours, original, rtol=0, atol=2.0**-22, err_msg=name)


def test_latents_of_old_files(small, tmp_path: Path):
    """Until 2025 DeepSeek's keys and values of all heads were one tensor."""
    source = tmp_path / "m.gguf"
    weights = {(n, i): w for n, i, w in small.write(source, "deepseek2")}
    config = small.config("deepseek2")

    def change(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
        widths = {"key": config.head_dim, "value": config.v_head_dim}
        for kind, width in widths.items():
            del writer.kv_data[0][f"deepseek2.attention.{kind}_length_mla"]
            writer.kv_data[0][f"deepseek2.attention.{kind}_length"].value = width
        writer.kv_data[0]["deepseek2.attention.head_count_kv"].value = 4
        for tensor in reader.tensors:
            layer = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk") else 0
            stack, number = ("layers", layer - 1) if layer else ("dense_layers", 0)
            if ".attn_k_b." in tensor.name:
                whole = weights[f"{stack}/self_attn/kv_b_proj/weight", number].T
                writer.add_tensor(f"blk.{layer}.attn_kv_b.weight", np.ascontiguousarray(whole))
            elif ".attn_v_b." not in tensor.name:
                writer.add_tensor(tensor.name, np.array(tensor.data))

    rewritten(source, tmp_path / "n.gguf", change)
    file = open_gguf(tmp_path / "n.gguf")
    assert file.config == config
    for name, layer, ours in file.weights():
        np.testing.assert_array_equal(ours, weights[name, layer], err_msg=f"{name} {layer}")


def test_missing_and_extra_tensors_are_named(small, tmp_path: Path):
    source = tmp_path / "m.gguf"
    small.write(source)

    def copy(leave_out: str, extra: str | None, shape: tuple[int, ...] = (4,)):
        def change(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
            for tensor in reader.tensors:
                if tensor.name != leave_out:
                    writer.add_tensor(tensor.name, np.array(tensor.data))
            if extra is not None:
                writer.add_tensor(extra, np.zeros(shape, np.float32))

        rewritten(source, tmp_path / "n.gguf", change)
        return open_gguf(tmp_path / "n.gguf")

    with pytest.raises(UsageError, match=r"n.gguf: tensor 'blk.1.ffn_up.weight': missing"):
        copy("blk.1.ffn_up.weight", None).load("norm/weight")
    with pytest.raises(UsageError, match=r"tensor 'blk.1.ffn_gate.bias': not part of the model"):
        copy("", "blk.1.ffn_gate.bias").load("norm/weight")
    with pytest.raises(UsageError, match=r"'output_norm.weight' has shape \(4,\)"):
        copy("output_norm.weight", "output_norm.weight").load("norm/weight")
    copy("", "blk.0.attn_rot_embd").load("norm/weight")
    untied = copy("", "output.weight", (96, 64))
    assert not untied.config.tie_word_embeddings and "lm_head" in untied.tensor_names


def test_a_type_without_weights_is_named(small, tmp_path: Path):
    source = tmp_path / "m.gguf"
    small.write(source)

    def change(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
        for tensor in reader.tensors:
            data = np.array(tensor.data)
            integers = tensor.name == "blk.0.attn_v.weight"
            writer.add_tensor(tensor.name, data.astype(np.int32) if integers else data)

    rewritten(source, tmp_path / "n.gguf", change)
    file = open_gguf(tmp_path / "n.gguf")
    with pytest.raises(UsageError, match="tensor 'blk.0.attn_v.weight' is of type I32"):
        file.load("layers/self_attn/v_proj/weight", 0)
