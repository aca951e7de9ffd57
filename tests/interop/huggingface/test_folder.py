"""A Hugging Face folder in: logits as transformers'; out again: every byte as it was."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxdist.config import MeshShape, ParallelConfig, UsageError
from jaxdist.interop.huggingface.folder import open_huggingface
from jaxdist.interop.huggingface.safetensors_file import INDEX, open_safetensors
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer
from jaxdist.parallel.sharding import Rules, layouts, parameter_specs, shardings

slow = pytest.mark.slow
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
BIASES = {"attention_bias": True, "mlp_bias": True}


def case(model_type: str, name: str, *marks: pytest.MarkDecorator, **fields):
    return pytest.param(model_type, fields, id=f"{model_type}-{name}", marks=marks)


CASES = [
    case("llama", "llama3", rope_scaling=LLAMA3),
    case("mistral", "window", slow, sliding_window=8, tie_word_embeddings=True),
    case("qwen2", "plain", slow),
    case("qwen3", "head_dim", slow, head_dim=16),
    case("llama", "tied", slow, tie_word_embeddings=True),
    case("llama", "biases", slow, **BIASES),
    case("llama", "yarn", slow, rope_scaling=YARN, rope_theta=5e5),
    case("llama", "longrope", slow, rope_scaling=LONGROPE),
    case("llama", "dynamic", slow, rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
    case("llama", "linear", slow, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    case("mistral", "no_window", slow, sliding_window=None),
    case("qwen2", "window", slow, **WINDOW),
    case("qwen3", "window", slow, head_dim=8, **WINDOW),
    case("qwen3", "biases", slow, head_dim=8, attention_bias=True, tie_word_embeddings=True),
]


def abstract(config, dtype=jnp.float32):
    make = lambda key: Transformer(config, key=key, param_dtype=dtype)  # noqa: E731
    return jax.eval_shape(make, jax.random.key(0))


def logits(folder, tokens):
    source = open_huggingface(folder)
    model = load_parameters(source, abstract(source.config))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jax.jit(lambda model: model(jnp.asarray(tokens), positions))(model)


def their_logits(folder, tokens):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


@pytest.mark.parametrize(("model_type", "fields"), CASES)
def test_both_ways_equal_transformers(model_type, fields, foreign, tmp_path):
    folder = foreign(model_type, **fields)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 24))
    expected = their_logits(folder, tokens)
    np.testing.assert_allclose(logits(folder, tokens), expected, atol=1e-4, rtol=0)

    source = open_huggingface(folder)
    write_huggingface(tmp_path / "ours", source.config, source.weights())
    back = open_huggingface(tmp_path / "ours")
    assert back.config == source.config
    before, after = open_safetensors(folder), open_safetensors(tmp_path / "ours")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        np.testing.assert_array_equal(after[name], tensor)
    np.testing.assert_allclose(their_logits(tmp_path / "ours", tokens), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bits_survive_32(dtype, foreign, tmp_path):
    """Stored in 16 bits, kept in 32 with a padded vocabulary, written in several files."""
    folder = foreign("llama", dtype)
    source = open_huggingface(folder)
    model = load_parameters(source, abstract(source.config))
    assert model.embed_tokens.shape == (128, 32) and not model.embed_tokens[61:].any()

    def weights():
        for name in source.tensor_names:
            *path, leaf = name.split("/")
            node = model
            for part in path:
                node = getattr(node, part)
            value = getattr(node, leaf)[...]
            for layer in range(2) if path[:1] == ["layers"] else [None]:
                yield name, layer, value if layer is None else value[layer]

    write_huggingface(
        tmp_path / "ours", source.config, weights(), dtype=dtype, max_shard_bytes=10_000
    )
    before, after = open_safetensors(folder), open_safetensors(tmp_path / "ours")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    assert (tmp_path / "ours" / INDEX).is_file()
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        np.testing.assert_array_equal(after[name].view(np.uint16), tensor.view(np.uint16))


@pytest.mark.parametrize("zero", [0, 3])
def test_shards_are_those_of_the_whole(zero, foreign):
    folder = foreign("llama", "bfloat16")
    source = open_huggingface(folder)
    like = abstract(source.config, jnp.bfloat16)
    whole = load_parameters(source, like)
    shape = MeshShape(dp=2, pp=2, tp=2)
    mesh = Mesh(np.array(jax.devices()).reshape(shape.degrees), ("dp", "pp", "tp"))
    rules = Rules.of(source.config, ParallelConfig(zero=zero), shape)
    wanted = shardings(mesh, parameter_specs(layouts(like, rules), zero))
    sharded_like = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), like, wanted
    )
    sharded = load_parameters(source, sharded_like)
    jax.tree.map(_equal_on, whole, sharded, wanted)


def _equal_on(whole, sharded, sharding):
    assert sharded.sharding == sharding
    for shard in sharded.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(whole)[shard.index])


def damaged(folder, tmp_path, change):
    """A copy of the folder whose config.json is changed."""
    shutil.copytree(folder, tmp_path / "damaged")
    path = tmp_path / "damaged" / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    return tmp_path / "damaged"


def test_tensors_that_are_missing_or_too_many_are_named(foreign, tmp_path):
    more = damaged(foreign("llama"), tmp_path, lambda v: v.update(attention_bias=True))
    with pytest.raises(UsageError, match=r"'model.layers.0.self_attn.._proj.bias'.*missing"):
        _ = open_huggingface(more).tensor_names
    shutil.rmtree(more)
    fewer = damaged(foreign("llama"), tmp_path, lambda v: v.update(num_hidden_layers=1))
    with pytest.raises(UsageError, match=r"'model.layers.1.*not part of LlamaForCausalLM"):
        _ = open_huggingface(fewer).tensor_names
    shutil.rmtree(fewer)
    wider = damaged(foreign("llama"), tmp_path, lambda v: v.update(intermediate_size=64))
    with pytest.raises(UsageError, match=r"has shape \[\d+, \d+\], but config.json asks for"):
        _ = open_huggingface(wider).tensor_names
    shutil.rmtree(wider)
    endless = damaged(foreign("llama"), tmp_path, lambda v: v.update(num_hidden_layers=10**9))
    with pytest.raises(UsageError, match="num_hidden_layers=1000000000 is more than"):
        _ = open_huggingface(endless).tensor_names


def test_a_tied_head_may_be_saved_too(foreign, tmp_path):
    folder = damaged(foreign("llama"), tmp_path, lambda v: v.update(tie_word_embeddings=True))
    assert "lm_head" not in open_huggingface(folder).tensor_names


def test_weights_that_do_not_come_are_named(foreign, tmp_path):
    source = open_huggingface(foreign("llama"))
    with pytest.raises(UsageError, match="1 weights of the model are missing, among them lm_head"):
        write_huggingface(
            tmp_path / "ours", source.config, (w for w in source.weights() if w[0] != "lm_head")
        )
    assert not list(tmp_path.iterdir())


def test_what_was_there_is_replaced_whole(foreign, tmp_path):
    source = open_huggingface(foreign("llama"))
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "old").touch()
    write_huggingface(
        tmp_path / "ours",
        source.config,
        source.weights(),
        companions={"tokenizer.json": b"{}", "config.json": b'{"eos_token_id": 7}'},
    )
    names = sorted(path.name for path in (tmp_path / "ours").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "ours/config.json").read_text())["eos_token_id"] == 7
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
