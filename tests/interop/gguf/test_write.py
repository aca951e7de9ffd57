from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.file import open_gguf
from jaxdist.interop.gguf.write import TYPES, write_gguf

NO_LOCAL = {"rope_local_base_freq": None}
YARN = {"rope_type": "yarn", "factor": 2.0}


@pytest.mark.parametrize("gguf_type", TYPES)
def test_the_packages_reader_reads_it(gguf_type: str, small, tmp_path: Path):
    path = tmp_path / "m.gguf"
    config = small.config("qwen2")
    weights = small.weights(config)
    write_gguf(path, config, weights, gguf_type=gguf_type, name="Tiny")
    reader = gguf.GGUFReader(path)
    fields = {name: found.contents() for name, found in reader.fields.items()}
    assert fields["general.architecture"] == "qwen2" and fields["general.name"] == "Tiny"
    wanted, number = TYPES[gguf_type]
    assert fields["general.file_type"] == number
    assert gguf.LlamaFileType(number).name in (f"MOSTLY_{wanted}", f"ALL_{wanted}")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert all(tensor.data_offset % 32 == 0 for tensor in tensors.values())
    down = tensors["blk.1.ffn_down.weight"]
    assert down.tensor_type.name == wanted and down.shape.tolist() == [96, 64]
    original = {(name, layer): array for name, layer, array in weights}
    expected = original["layers/mlp/down_proj/weight", 1].T
    stored = gguf.dequantize(down.data, down.tensor_type)
    np.testing.assert_allclose(stored, expected, rtol=0, atol=0.15 * np.abs(expected).max())
    norm = tensors["blk.0.attn_norm.weight"]
    np.testing.assert_array_equal(norm.data, original["layers/input_layernorm/weight", 0])


@pytest.mark.parametrize(
    ("model", "fields", "architecture"),
    [
        ("llama", {}, "llama"),
        ("llama", {"mlp_bias": True, "qkv_bias": True}, "llama"),
        *(
            (name, {}, name)
            for name in ("qwen2", "qwen3", "qwen3moe", "olmo2", "gemma2", "gpt2", "deepseek2")
        ),
        ("mixtral", {}, "llama"),
        ("gemma3", {"sliding_window": None, "sliding_window_pattern": None, **NO_LOCAL}, "gemma3"),
        ("gemma2", {"num_hidden_layers": 46, "query_pre_attn_scalar": 16}, "gemma2"),
    ],
)
def test_the_architecture_fits_the_config(
    model: str, fields: dict, architecture: str, small, tmp_path: Path
):
    config = small.config(model, **fields)
    write_gguf(tmp_path / "m.gguf", config, small.weights(config))
    file = open_gguf(tmp_path / "m.gguf")
    assert file.header.metadata["general.architecture"] == architecture
    assert file.config == config


def test_a_preferred_architecture_is_taken_if_it_fits(small, tmp_path: Path):
    for preferred, taken in (("phi3", "phi3"), ("gemma2", "llama"), ("bloom", "llama")):
        config = small.config("phi3")
        write_gguf(tmp_path / "m.gguf", config, small.weights(config), preferred=preferred)
        assert open_gguf(tmp_path / "m.gguf").architecture.name == taken


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("gemma2", {"query_pre_attn_scalar": 9}, "of gemma2 .* query_pre_attn_scalar=9"),
        ("gemma2", {"attn_logit_softcapping": None}, "of gemma2 .* attn_logit_softcapping=None"),
        ("gemma3", NO_LOCAL, "of gemma3 .* rope_local_base_freq=None"),
        ("gemma3", {"rope_scaling": YARN}, "of gemma3 .* rope_scaling="),
        ("olmo2", {"head_dim": 32}, "of olmo2 .* head_dim=32"),
        ("qwen2", {"norm_order": "post"}, "of qwen2 .* norm_order=post"),
        ("qwen3moe", {"norm_topk_prob": False}, "of qwen3moe .* norm_topk_prob=False"),
        ("deepseek2", {"n_shared_experts": 0}, "of deepseek2 .* n_shared_experts=0"),
        ("deepseek2", {"rope_scaling": YARN}, "mscale equals mscale_all_dim"),
    ],
)
def test_what_no_reader_would_compute_is_refused(
    model: str, fields: dict, message: str, small, tmp_path: Path
):
    """Rather than written without what differs."""
    config = small.config(model, **fields)
    with pytest.raises(UsageError, match=message):
        write_gguf(tmp_path / "m.gguf", config, small.weights(config))


def test_order_dtype_and_padding_of_the_weights_do_not_matter(small, tmp_path: Path):
    config = small.config("phi3", vocab_size=95)
    weights = small.weights(config)
    for name in ("a", "b"):
        given = weights
        if name == "b":
            given = [
                (n, i, np.pad(w, ((0, 33), (0, 0))) if n in ("embed_tokens", "lm_head") else w)
                for n, i, w in reversed(weights)
            ]
            given = ((n, i, w.astype(ml_dtypes.bfloat16)) for n, i, w in given)
        path = tmp_path / f"{name}.gguf"
        write_gguf(path, config, given, gguf_type="bf16", architecture="phi3", name="m")
    plain, padded = (open_gguf(tmp_path / f"{name}.gguf") for name in ("a", "b"))
    for (name, layer, one), (_, _, other) in zip(plain.weights(), padded.weights(), strict=True):
        rounded = one.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(rounded, other, err_msg=f"{name} {layer}")


def test_vocabulary_fills_the_embedding(small, tmp_path: Path):
    config = small.config("llama")
    tokenizer = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "a", "b"],
        "tokenizer.ggml.scores": np.array([0, -1, -2], np.float32),
        "tokenizer.ggml.token_type": [2, 1, 1],
        "tokenizer.ggml.add_bos_token": False,
    }
    path = tmp_path / "m.gguf"
    write_gguf(path, config, small.weights(config), tokenizer=tokenizer)
    read = {name: found.contents() for name, found in gguf.GGUFReader(path).fields.items()}
    tokens = read["tokenizer.ggml.tokens"]
    assert tokens[:4] == ["<unk>", "a", "b", "[PAD3]"] and len(set(tokens)) == 96
    assert read["tokenizer.ggml.token_type"] == [2, 1, 1] + 93 * [5]
    assert len(read["tokenizer.ggml.scores"]) == 96
    assert read["tokenizer.ggml.add_bos_token"] is False
    # A file's own metadata can be handed on.
    metadata = open_gguf(path).header.metadata
    handed = {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    write_gguf(tmp_path / "n.gguf", config, small.weights(config), tokenizer=handed)
    again = gguf.GGUFReader(tmp_path / "n.gguf").fields
    assert all(again[key].contents() == read[key] for key in handed)
    tokenizer["tokenizer.ggml.tokens"] = [str(i) for i in range(97)]
    with pytest.raises(UsageError, match="97 tokens, more than model.vocab_size=96"):
        write_gguf(path, config, small.weights(config), tokenizer=tokenizer)


def test_what_is_wrong_is_named_and_leaves_the_old_file(small, tmp_path: Path):
    config, path = small.config("llama"), tmp_path / "m.gguf"
    weights = small.weights(config)
    path.write_bytes(b"old")

    def refused(message: str, given: list, **options) -> None:
        with pytest.raises(UsageError, match=message):
            write_gguf(path, options.pop("config", config), given, **options)
        assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]

    refused("'q8' is not one of f32, .*did you mean q8_0", weights, gguf_type="q8")
    refused("'bloom' is not one of qwen3", weights, architecture="bloom")
    refused("cannot be written as the GGUF architecture qwen3", weights, architecture="qwen3")
    refused("1 weights .* missing, among them norm/weight", weights[:-1])
    refused("norm/weight is not part of the model, or came twice", [*weights, weights[-1]])
    refused("lm_head is not part", [*weights, ("lm_head", None, weights[0][2])])
    name, layer, array = weights[-2]
    refused(f"{name} of layer 1 has shape", [*weights[:-2], (name, layer, array[:-1]), weights[-1]])
    broken = [(n, i, np.full_like(w, 1e9)) for n, i, w in weights]
    refused("holds a weight that is not finite in F16", broken, gguf_type="f16")
    odd = small.config("llama", norm="layernorm")
    refused(
        "no GGUF architecture of .* expresses .* differs is norm=layernorm",
        small.weights(odd),
        config=odd,
    )


def test_a_failing_source_leaves_nothing(small, tmp_path: Path):
    config = small.config("llama")

    def source():
        yield small.weights(config)[0]
        raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError):
        write_gguf(tmp_path / "m.gguf", config, source())
    assert not list(tmp_path.iterdir())
