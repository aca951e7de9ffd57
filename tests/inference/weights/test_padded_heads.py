"""tp that does not divide the heads: as many of zeros as are missing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import MeshShape, ModelConfig, UsageError
from jaxdist.inference.device import default_mesh
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.weights.padded_heads import with_padded_heads
from jaxdist.interop.huggingface.folder import open_huggingface
from jaxdist.interop.huggingface.write import write_huggingface
from jaxdist.interop.source import load_parameters
from jaxdist.models import Transformer
from tests.interop.test_source import random_weights


def config_of(heads: int, kv_heads: int, **fields) -> ModelConfig:
    defaults = {"vocab_size": 61, "hidden_size": 36, "intermediate_size": 48, "head_dim": 4}
    defaults |= {"num_hidden_layers": 2}
    return ModelConfig(**defaults | fields, num_attention_heads=heads, num_key_value_heads=kv_heads)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "padded"),
    [
        (9, 3, 2, (12, 4)),
        (9, 3, 4, (12, 4)),
        (8, 4, 4, (8, 4)),
        (8, 2, 4, (8, 2)),  # repeated
        (14, 2, 4, (14, 2)),  # twice as many would cost too much
        (5, 5, 4, (5, 5)),
        (3, 3, 3, (3, 3)),
    ],
)
def test_how_many(heads, kv_heads, tp, padded):
    found = with_padded_heads(config_of(heads, kv_heads), tp)
    assert (found.num_attention_heads, found.num_key_value_heads) == padded
    assert found.head_dim == 4


def test_what_a_norm_sees_together_is_not_padded():
    config = config_of(9, 3, qk_norm=True, qk_norm_width="all")
    assert with_padded_heads(config, 2) == config
    with pytest.raises(UsageError, match="num_attention_heads=9 is not divisible by tp=2"):
        RunnerOptions().check(config, MeshShape(tp=2))


def test_weights_in_their_files_blocks_are_not_padded():
    with pytest.raises(UsageError, match="num_attention_heads=9 is not divisible by tp=2"):
        RunnerOptions(quantization="keep").check(config_of(9, 3), MeshShape(tp=2))


def test_weights_of_padded_heads_are_zeros(tmp_path):
    config = config_of(9, 3, qkv_bias=True)
    write_huggingface(tmp_path / "m", config, random_weights(config), dtype="float32")
    weights = open_huggingface(tmp_path / "m")

    def loaded(config):
        like = jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))
        return load_parameters(weights, like)

    own, padded = loaded(config), loaded(with_padded_heads(config, 2))
    for small, large in zip(jax.tree.leaves(own), jax.tree.leaves(padded), strict=True):
        pads = [(0, n - m) for n, m in zip(large.shape, small.shape, strict=True)]
        np.testing.assert_array_equal(large, jnp.pad(small, pads))
    assert padded.layers.self_attn.q_proj.weight[...].shape == (2, 36, 48)


def test_the_mesh_where_none_is_asked_for(monkeypatch):
    monkeypatch.setattr(default_mesh, "num_cores", lambda: 6)
    options = RunnerOptions()
    large = {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64}
    large = config_of(9, 3, **large)
    assert default_mesh.mesh_for(None, large, options) == MeshShape(tp=4)  # 5 and 6 do not divide
    assert default_mesh.mesh_for(MeshShape(dp=-1), large, options) == MeshShape(dp=8)
    keep = RunnerOptions(quantization="keep")
    assert default_mesh.mesh_for(None, large, keep) == MeshShape()
    assert default_mesh.mesh_for(None, config_of(8, 8), options) == MeshShape()  # too small
