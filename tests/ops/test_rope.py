"""RoPE tables equal transformers' for each scaling, at lengths below and above its switches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig, UsageError
from jaxdist.ops.rope import apply_rope, layer_rope, rope_table

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.707,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "truncate": False,
        "attention_factor": 1.3,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 32,
    },
    "longrope_factor": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 32,
        "factor": 16.0,
    },
}


def config_of(scaling: dict | None) -> ModelConfig:
    return ModelConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_theta=10000.0,
        rope_scaling=scaling,
    )


@pytest.mark.parametrize("length", [20, 33, 64, 100])
@pytest.mark.parametrize("name", SCALINGS)
def test_table_equals_transformers(name, length):
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = config_of(SCALINGS[name])
    theirs = llama.LlamaRotaryEmbedding(
        llama.LlamaConfig(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=config.rope_theta,
            rope_scaling=SCALINGS[name] and dict(SCALINGS[name]),
        )
    )
    expected = theirs(torch.zeros(1, 1), torch.arange(length)[None])
    table = rope_table(config, jnp.arange(length)[None])
    for ours, full in zip(table, expected, strict=True):  # theirs holds each column twice
        np.testing.assert_allclose(jnp.tile(ours, 2), full.numpy(), atol=2e-5, rtol=0)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_row_does_not_depend_on_its_neighbours(name):
    config = config_of(SCALINGS[name])
    short, long = jnp.arange(100) % 20, jnp.arange(100)
    together = rope_table(config, jnp.stack([short, long]))
    alone = rope_table(config, short[None])
    np.testing.assert_array_equal(together[0][:1], alone[0])
    assert not np.allclose(together[0][1, :20], together[0][0, :20], atol=1e-3)


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_a_decoded_token_has_the_angles_of_a_prompt_of_that_length(name):
    config = config_of(SCALINGS[name])
    prompt = rope_table(config, jnp.arange(100)[None])
    token = rope_table(config, jnp.array([[99]]))
    np.testing.assert_array_equal(prompt[1][:, -1:], token[1])


def test_rotation_equals_transformers():
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    x = np.random.default_rng(0).normal(size=(2, 5, 3, 16)).astype(np.float32)  # [B, T, N, H]
    rope = rope_table(config_of(None), jnp.array([[0, 1, 2, 0, 1], [7, 8, 9, 10, 11]]))
    cos, sin = (torch.tensor(np.tile(table, 2)) for table in rope)
    expected, _ = llama.apply_rotary_pos_emb(
        torch.tensor(x), torch.tensor(x), cos, sin, unsqueeze_dim=2
    )
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), rope), expected, atol=1e-6)


def test_low_precision_is_rotated_in_fp32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 2, 16)), jnp.bfloat16)
    rope = rope_table(config_of(None), jnp.arange(64)[None])
    rotated = apply_rope(x, rope)
    assert rotated.dtype == jnp.bfloat16
    expected = apply_rope(x.astype(jnp.float32), rope).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotated, expected)


def test_unknown_scaling_is_refused_by_the_config_and_by_the_table():
    with pytest.raises(UsageError, match="rope_type"):
        config_of({"rope_type": "su", "factor": 2.0})
    config = config_of(None)
    object.__setattr__(config, "rope_scaling", {"rope_type": "su"})
    with pytest.raises(ValueError, match="'su' is unknown; choose default, linear"):
        rope_table(config, jnp.zeros((1, 1), jnp.int32))


def test_backward_equals_autodiff_of_the_rotation():
    random = np.random.default_rng(0)
    x, weight = jnp.asarray(random.normal(size=(2, 2, 5, 3, 8)), jnp.float32)
    angle = jnp.asarray(random.normal(size=(2, 5, 4)), jnp.float32)
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def plain(x):
        first, second = jnp.split(x, 2, axis=-1)
        c, s = cos[:, :, None], sin[:, :, None]
        return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)

    got = jax.grad(lambda x: (apply_rope(x, (cos, sin)) * weight).sum())(x)
    want = jax.grad(lambda x: (plain(x) * weight).sum())(x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_all_layers_may_be_local():
    """Then the base of the others counts for none."""
    fields = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    model = partial(ModelConfig, num_attention_heads=2, **fields)
    positions = jnp.arange(9)[None]
    windows = {"sliding_window": 4, "rope_local_base_freq": 100.0, "rope_theta": 1e6}
    local = layer_rope(rope_table(model(**windows), positions), None)
    expected = rope_table(model(rope_theta=100.0), positions)
    for ours, wanted in zip(local, expected, strict=True):
        np.testing.assert_array_equal(ours, wanted)
