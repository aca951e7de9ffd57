"""A tiny model with random weights."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.models import Transformer


@pytest.fixture(scope="session")
def model_of() -> Callable[..., Transformer]:
    """model_of(**fields): weights large enough that the likeliest token stands out."""

    def make(**fields: Any) -> Transformer:
        defaults: dict[str, Any] = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
        }
        config = ModelConfig(**defaults | fields)
        rng = np.random.default_rng(0)
        return jax.tree.map(
            lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32),
            jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0)),
        )

    return make
