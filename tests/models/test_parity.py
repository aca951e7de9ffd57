"""The decoder equals transformers': logits and every gradient leaf, in fp32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.models import Transformer

slow = pytest.mark.slow
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
YARN_ALL = YARN | {
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.5, 2.0],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}  # with a context of 16 tokens, exceeded below
ALL_BIASES = {"qkv_bias": True, "attention_output_bias": True, "mlp_bias": True}


def case(family: str, name: str, *marks: pytest.MarkDecorator, **fields):
    return pytest.param(family, fields, id=f"{family}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        case("llama", "gqa"),
        case("mistral", "window", slow, sliding_window=8, tie_word_embeddings=True),
        case("qwen2", "qkv_bias", slow, qkv_bias=True),
        case("qwen3", "qk_norm", slow, qk_norm=True, head_dim=16),
        case("llama", "tied", slow, tie_word_embeddings=True),
        case("llama", "mha", slow, num_key_value_heads=4),
        case("llama", "mqa", slow, num_key_value_heads=1),
        case("llama", "biases", slow, **ALL_BIASES),
        case("qwen2", "tied", slow, qkv_bias=True, tie_word_embeddings=True),
        case("qwen3", "tied", slow, qk_norm=True, tie_word_embeddings=True),
        case("mistral", "no_window", slow, sliding_window=None),
        case("llama", "theta", slow, rope_theta=500000.0),
        case("llama", "linear", slow, rope_scaling={"rope_type": "linear", "factor": 4.0}),
        case("llama", "dynamic", slow, max_position_embeddings=16, rope_scaling=DYNAMIC),
        case("llama", "llama3", slow, rope_scaling=LLAMA3),
        case("llama", "yarn", slow, rope_scaling=YARN),
        case("llama", "yarn_all", slow, rope_scaling=YARN_ALL),
        case("llama", "longrope", slow, rope_scaling=LONGROPE),
    ],
)
def test_equals_transformers(family, fields, tiny_config, make_twin):
    torch = pytest.importorskip("torch")
    config = tiny_config(**fields)
    twin = make_twin(family, config)
    tokens, labels = np.random.default_rng(0).integers(0, config.vocab_size, (2, 2, 24))

    expected = twin.theirs(torch.tensor(tokens)).logits
    torch.nn.functional.cross_entropy(
        expected.flatten(0, 1), torch.tensor(labels.flatten()), reduction="sum"
    ).backward()

    def loss(model: Transformer) -> tuple[jax.Array, jax.Array]:
        logits = model(jnp.asarray(tokens), positions)
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(log_probs, labels[..., None], axis=-1).sum(), logits

    positions = jnp.broadcast_to(jnp.arange(24), (2, 24))
    gradients, logits = jax.jit(jax.grad(loss, has_aux=True))(twin.ours)
    np.testing.assert_allclose(logits, expected.detach().numpy(), atol=1e-4, rtol=0)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0),
        gradients,
        twin.gradients(),
    )
