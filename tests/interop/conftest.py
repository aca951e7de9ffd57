"""Tiny models with random weights: Hugging Face folders that transformers wrote, GGUF files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.interop.gguf.write import Weight, write_gguf
from jaxdist.interop.leaves import layers_of, leaf_shapes
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
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {
    "norm": "rmsnorm1p",
    "norm_order": "sandwich",
    "mlp": "geglu",
    "scale_embeddings": True,
    "tie_word_embeddings": True,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 5,
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
    "mixtral": {"architecture": "llama", "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3moe": EXPERTS | {"qk_norm": True, "head_dim": 32},
    "olmo2": {"norm_order": "post", "qk_norm": True, "qk_norm_width": "all"},
    "gemma2": GEMMA
    | {
        "sliding_window_pattern": 2,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": GEMMA
    | {
        "sliding_window_pattern": 3,
        "qk_norm": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "gpt2": {
        "norm": "layernorm",
        "mlp": "gelu",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "deepseek2": EXPERTS
    | {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "scoring_func": "sigmoid",
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "n_shared_experts": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
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
            for layer in layers_of(name, config):
                one = shape if layer is None else shape[1:]
                values = 0.2 * rng.standard_normal(one).astype(np.float32)
                if "norm" in name and config.norm == "rmsnorm1p":
                    values = np.round(values * 4096) / 4096  # a file has 1 + them, in fp32 too
                elif "norm" in name:
                    values += 1
                weights.append((name, layer, values))
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
