"""Tiny models, and the twin from Hugging Face transformers (torch, CPU) of a ModelConfig."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.models import Transformer


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., ModelConfig]:
    """tiny_config(**fields): two layers of four heads over two kv heads, a prime vocabulary."""
    return _tiny_config


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Transformer]:
    """tiny_model(**fields): the Transformer of tiny_config(**fields), made once for each config."""
    return lambda **fields: _tiny_model(_tiny_config(**fields))


@pytest.fixture(scope="session")
def make_twin() -> "Callable[[str, ModelConfig], Twin]":
    """make_twin(family, config) -> Twin, of the families llama, mistral, qwen2 and qwen3."""
    return _make_twin


@dataclass(frozen=True, kw_only=True)
class Twin:
    """Our model and theirs with the same random weights."""

    ours: Transformer
    theirs: Any

    def gradients(self) -> Transformer:
        """The gradients of torch's last backward, as our pytree."""
        weights = dict(self.theirs.named_parameters())
        return _as_ours(self.ours, lambda name: weights[name].grad.numpy())


def _tiny_config(**fields: Any) -> ModelConfig:
    defaults: dict[str, Any] = {
        "vocab_size": 61,
        "vocab_multiple": 32,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    }
    return ModelConfig(**defaults | fields)


@cache
def _tiny_model(config: ModelConfig) -> Transformer:
    """Normal weights around 0, norm gains around 1; by numpy, which compiles nothing."""
    rng = np.random.default_rng(0)

    def leaf(path: tuple[Any, ...], like: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        mean = 1.0 if name.endswith("norm.weight.value") else 0.0
        return jnp.asarray(rng.normal(mean, config.initializer_range, like.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(leaf, _abstract(config))


def _abstract(config: ModelConfig) -> Transformer:
    return jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))


def _make_twin(family: str, config: ModelConfig) -> Twin:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    names = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim max_position_embeddings rms_norm_eps rope_theta "
        "tie_word_embeddings"
    )
    fields = {name: getattr(config, name) for name in names.split()}
    fields |= {"rope_scaling": _thawed(config.rope_scaling), "attn_implementation": "eager"}
    if family == "llama":
        fields |= {"attention_bias": config.qkv_bias, "mlp_bias": config.mlp_bias}
    if family == "mistral":
        fields |= {"sliding_window": config.sliding_window}
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family, **fields), dtype=torch.float32
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in theirs.named_parameters():  # biases and gains too, which start plain
            mean, std = (1.0, 0.2) if "norm" in name else (0.0, 0.2)
            weight.normal_(mean, std)
    weights = theirs.state_dict()
    ours = _as_ours(_abstract(config), lambda name: weights[name].numpy())
    return Twin(ours=ours, theirs=theirs)


def _as_ours(model: Transformer, read: Callable[[str], np.ndarray]) -> Transformer:
    """A pytree like `model` with every leaf read by its Hugging Face name."""
    num_layers = model.config.num_hidden_layers

    def leaf(path: tuple[Any, ...], like: jax.Array) -> jax.Array:
        first, *rest = [key.name for key in path[:-1]]  # the last key is the Param's value
        if first == "layers":
            names = [".".join(["model.layers", str(layer), *rest]) for layer in range(num_layers)]
            value = np.stack([read(name) for name in names])
            value = value.swapaxes(1, 2) if value.ndim == 3 else value  # torch's are [out, in]
        elif first == "lm_head":
            value = read("lm_head.weight")
        elif first == "embed_tokens":
            value = read("model.embed_tokens.weight")
        else:
            value = read(".".join(["model", first, *rest]))
        padding = like.shape[0] - value.shape[0]
        return jnp.asarray(np.pad(value, [(0, padding)] + [(0, 0)] * (value.ndim - 1)))

    return jax.tree_util.tree_map_with_path(leaf, model)


def _thawed(scaling: Any) -> Any:
    """The frozen dict as one that transformers may write to."""
    if scaling is None:
        return None
    return {key: list(v) if isinstance(v, tuple) else v for key, v in scaling.items()}
