from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf import open_gguf
from jaxdist.interop.gguf_write import TYPES
from jaxdist.quantization.gguf_blocks import unpack

MODELS = ("llama", "llama, biases, wide heads", "qwen2", "qwen3", "phi3")


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


@pytest.mark.parametrize("model", MODELS)
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
@pytest.mark.parametrize("model", ["llama", "qwen2", "qwen3", "phi3"])
def test_transformers_reads_the_same_model(model: str, small, tmp_path: Path):
    """An independent reader of GGUF: names, orientation, and the order of q's and k's rows."""
    small.write(tmp_path / "m.gguf", model)
    file = open_gguf(tmp_path / "m.gguf")
    tokens = np.random.default_rng(7).integers(0, file.config.vocab_size, (2, 12))
    # What transformers does not take from the file.
    fields = {"pad_token_id": 0, "eos_token_id": 1}
    fields |= {"head_dim": file.config.head_dim} if model == "qwen3" else {}
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


@pytest.mark.parametrize(("model", "gguf_type"), [("llama", "q8_0"), ("phi3", "q4_0")])
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
        rows = plain if name in ("embed_tokens", "lm_head") else plain.T
        np.testing.assert_array_equal(unpack(file.load_packed(name, layer)), rows)


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
