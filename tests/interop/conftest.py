"""Tiny models with random weights: Hugging Face folders that transformers wrote, GGUF files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.interop.gguf_write import Weight, write_gguf
from jaxdist.interop.leaves import STACK, leaf_shapes
from jaxdist.interop.source import WeightSource, load_parameters
from jaxdist.models import Transformer

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """foreign(model_type, **fields) -> folder saved by transformers; made once for equal fields."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def make(model_type: str, dtype: str = "float32", **fields: Any) -> Path:
        key = repr((model_type, dtype, sorted(fields.items())))
        if key not in made:
            config = transformers.AutoConfig.for_model(model_type, **SHAPE | fields)
            model = transformers.AutoModelForCausalLM.from_config(config)
            torch.manual_seed(0)
            with torch.no_grad():
                for name, weight in model.named_parameters():
                    weight.normal_(1.0 if "norm" in name else 0.0, 0.2)
            made[key] = tmp_path_factory.mktemp(model_type) / "model"
            model.to(getattr(torch, dtype)).save_pretrained(made[key])
        return made[key]

    return make


# Rows are whole numbers of blocks of 32.
GGUF_SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GGUF_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "llama, biases, wide heads": {
        "architecture": "llama",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "head_dim": 32,
    },
    "qwen2": {"qkv_bias": True, "rope_theta": 1e6},
    "qwen3": {"qk_norm": True, "head_dim": 32},
    "phi3": {},
}


@pytest.fixture(scope="session")
def small() -> "SmallModels":
    return SmallModels()


class SmallModels:
    """The models of `GGUF_MODELS`, by name."""

    def config(self, model: str, **changes: Any) -> ModelConfig:
        fields = {k: v for k, v in GGUF_MODELS[model].items() if k != "architecture"}
        return ModelConfig(**{**GGUF_SHAPE, **fields, **changes})

    def weights(self, config: ModelConfig, seed: int = 0) -> list[Weight]:
        """Random ones of about a trained model's size, norm gains near 1."""
        rng = np.random.default_rng(seed)
        weights: list[Weight] = []
        for name, shape in leaf_shapes(config).items():
            stacked = name.startswith(STACK)
            for layer in range(config.num_hidden_layers) if stacked else (None,):
                one = shape[1:] if stacked else shape
                values = 0.2 * rng.standard_normal(one).astype(np.float32)
                weights.append((name, layer, values + 1 if "norm" in name else values))
        return weights

    def write(
        self, path: Path, model: str = "llama", gguf_type: str = "f32", **changes: Any
    ) -> list[Weight]:
        """Write random weights to `path`; the weights."""
        config = self.config(model, **changes)
        weights, name = self.weights(config), GGUF_MODELS[model].get("architecture", model)
        write_gguf(path, config, weights, gguf_type=gguf_type, architecture=name)
        return weights

    def logits(self, source: WeightSource, tokens: np.ndarray) -> np.ndarray:
        """[B, T, V] of tokens [B, T]."""
        like = jax.eval_shape(lambda: Transformer(source.config, key=jax.random.key(0)))
        model = load_parameters(source, like)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        return np.asarray(jax.jit(lambda m, t, p: m(t, p))(model, jnp.asarray(tokens), positions))
