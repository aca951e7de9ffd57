"""Which GGUF architecture a model is written as: the first whose readers compute what it does."""

from dataclasses import fields

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.architectures import ARCHITECTURES, KEYS, Architecture

# What any model may have its own value of, or what only training knows; every other field is its
# architecture's matter.
FREE = {
    *KEYS,
    "vocab_size",
    "rope_scaling",
    "tie_word_embeddings",
    "initializer_range",
    "router_aux_loss_coef",
    "vocab_multiple",
    "preset",
}


def architecture_for(config: ModelConfig, preferred: str | None = None) -> Architecture:
    """The architecture that a config is written as, `preferred` if it can be.

    UsageError where none can express it, which names what differs from the nearest.
    """
    for name in (preferred, *ARCHITECTURES):
        if name in ARCHITECTURES and not differing(ARCHITECTURES[name], config):
            return ARCHITECTURES[name]
    nearest = min(
        ARCHITECTURES.values(), key=lambda architecture: len(differing(architecture, config))
    )
    given = ", ".join(f"{key}={getattr(config, key)}" for key in differing(nearest, config))
    raise UsageError(
        f"no GGUF architecture of {', '.join(ARCHITECTURES)} expresses this model (of "
        f"{nearest.name} what differs is {given}); write a Hugging Face folder"
    )


def differing(architecture: Architecture, config: ModelConfig) -> list[str]:
    """The fields of a config that an architecture's models cannot have as they are."""
    wrong = [key for key, value in architecture.implies.items() if getattr(config, key) != value]
    wrong += [key for key in architecture.needs if not getattr(config, key)]
    wrong += [
        f.name
        for f in fields(ModelConfig)
        if f.name not in FREE | architecture.named and getattr(config, f.name) != f.default
    ]
    if (config.rope_scaling or {}).get("rope_type") not in (None, *architecture.scalings):
        wrong.append("rope_scaling")
    width = config.num_attention_heads * config.head_dim
    if architecture.square and width != config.hidden_size:
        wrong.append("head_dim")
    scalar = implied_scalar(architecture, config)
    if architecture.wide_layers and (config.query_pre_attn_scalar or config.head_dim) != scalar:
        wrong.append("query_pre_attn_scalar")
    own_local = config.rope_local_base_freq is not None or config.sliding_window is None
    if "rope_local_base_freq" in architecture.keys and not own_local:
        wrong.append("rope_local_base_freq")
    return wrong


def implied_scalar(architecture: Architecture, config: ModelConfig) -> int:
    """By the root of what its readers divide attention scores."""
    if architecture.wide_layers == config.num_hidden_layers:
        return config.hidden_size // config.num_attention_heads
    return config.head_dim
