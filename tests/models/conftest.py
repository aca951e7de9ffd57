"""The twin from Hugging Face transformers (torch, CPU) of a ModelConfig, for parity tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import ModelConfig
from jaxdist.models import Transformer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@dataclass(frozen=True, kw_only=True)
class Twin:
    """Our model and theirs with the same random weights."""

    ours: Transformer
    theirs: Any

    def gradients(self) -> Transformer:
        """The gradients of torch's last backward, as our pytree."""
        weights = dict(self.theirs.named_parameters())
        return _as_ours(self.ours, lambda name: weights[name].grad.numpy())


@pytest.fixture(scope="session")
def make_twin() -> Callable[[str, ModelConfig], Twin]:
    """make_twin(family, config) -> Twin, of the families llama, mistral, qwen2 and qwen3."""
    return _make_twin


def _make_twin(family: str, config: ModelConfig) -> Twin:
    fields = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": _plain(config.rope_scaling),
        "tie_word_embeddings": config.tie_word_embeddings,
        "attn_implementation": "eager",
    }
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
    abstract = jax.eval_shape(lambda key: Transformer(config, key=key), jax.random.key(0))
    weights = theirs.state_dict()
    ours = _as_ours(abstract, lambda name: weights[name].numpy())
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


def _plain(scaling: Any) -> Any:
    """Dicts and lists that torch may change, out of a frozen config."""
    if scaling is None:
        return None
    return {key: list(v) if isinstance(v, tuple) else v for key, v in scaling.items()}
