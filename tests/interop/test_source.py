"""Foreign weights into arrays: what the host holds meanwhile, and the way of accelerators."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.interop import source
from jaxdist.interop.huggingface.folder import open_huggingface
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.interop.leaves import STACK, leaf_shapes
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer


def random_weights(config: ModelConfig):
    rng = np.random.default_rng(0)
    for name, shape in leaf_shapes(config).items():
        if name.startswith(STACK):
            for layer in range(config.num_hidden_layers):
                yield name, layer, rng.standard_normal(shape[1:], np.float32)
        else:
            yield name, None, rng.standard_normal(shape, np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    config = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    folder = tmp_path_factory.mktemp("source") / "model"
    write_huggingface(folder, config, random_weights(config), dtype="bfloat16")
    return folder


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_the_way_of_accelerators_gives_the_same(dtype, folder, monkeypatch):
    weights = open_huggingface(folder)
    like = jax.eval_shape(
        lambda key: Transformer(weights.config, key=key, param_dtype=dtype), jax.random.key(0)
    )
    expected = load_parameters(weights, like)
    # Without memory on the host a part is put together on its device.
    monkeypatch.setattr(source._Part, "allocate", lambda self: None)
    jax.tree.map(np.testing.assert_array_equal, load_parameters(weights, like), expected)
    assert all(a.dtype == dtype for a in jax.tree.leaves(expected))


def test_values_are_those_written(folder):
    weights = open_huggingface(folder)
    like = jax.eval_shape(lambda key: Transformer(weights.config, key=key), jax.random.key(0))
    model = load_parameters(weights, like)
    written = {(n, i): a.astype(jnp.bfloat16) for n, i, a in random_weights(weights.config)}
    gate = np.asarray(model.layers.mlp.gate_proj.weight[...])
    np.testing.assert_array_equal(gate[2], written["layers/mlp/gate_proj/weight", 2])
    head = np.asarray(model.lm_head[...])
    np.testing.assert_array_equal(head[:61], written["lm_head", None])
    assert not head[61:].any()


MEASURED = """
import sys, threading, time
import jax, jax.numpy as jnp, numpy as np
from jaxdist.config import ModelConfig
from jaxdist.interop.huggingface.folder import open_huggingface
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

weights = open_huggingface(sys.argv[1])
like = jax.eval_shape(lambda key: Transformer(weights.config, key=key), jax.random.key(0))
jax.block_until_ready(jnp.zeros(3))
largest = max(t.nbytes for t in map(weights.load, ("embed_tokens", "norm/weight")))
peak, done = 0, False

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.0005)

thread = threading.Thread(target=watch)
thread.start()
before = anonymous()
model = jax.block_until_ready(load_parameters(weights, like))
done = True
thread.join()
kept = sum(a.nbytes for a in jax.tree.leaves(model))
print(peak - before, kept, largest)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_host_holds_less_than_one_tensor_more(tmp_path):
    config = ModelConfig(
        vocab_size=40_000,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        tie_word_embeddings=True,
    )
    zeros = (
        (name, layer, np.zeros(shape[1:] if name.startswith(STACK) else shape, np.float32))
        for name, shape in leaf_shapes(config).items()
        for layer in (range(8) if name.startswith(STACK) else (None,))
    )
    write_huggingface(tmp_path / "model", config, zeros, dtype="bfloat16")
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "model")]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    grown, kept, largest = map(int, out.split())
    assert kept > 3 * largest
    assert grown - kept < 1.5 * largest, (grown, kept, largest)
