"""ModelConfig to and from the metadata of a GGUF file."""

from dataclasses import replace
from reprlib import repr as brief
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.interop import gguf_rope
from jaxdist.interop.gguf_architectures import ARCHITECTURES
from jaxdist.interop.gguf_fields import Fields
from jaxdist.interop.gguf_header import GGUFHeader

# Keys that change the arithmetic in ways ModelConfig cannot express, and what they may say.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
}


def architecture_of(header: GGUFHeader) -> str:
    """The file's architecture; UsageError where it is not in our table."""
    name = Fields(header, "general.").text("architecture")
    if name not in ARCHITECTURES:
        raise UsageError(
            f"{header.path}: general.architecture: {name!r} is not one of "
            f"{', '.join(ARCHITECTURES)}{did_you_mean(name, ARCHITECTURES)}"
        )
    split = Fields(header, "split.")
    if (parts := split.whole("count", 1)) != 1:
        split.fail("count", f"the model lies in {parts} files; llama-gguf-split --merge joins them")
    return name


def read_config(header: GGUFHeader) -> ModelConfig:
    """The model that a file holds. UsageError, naming file and key, where ours differs from it."""
    name = architecture_of(header)
    fields = Fields(header, f"{name}.")
    for key, neutral in NEUTRAL.items():
        value = header.metadata.get(f"{name}.{key}")
        if value is not None and not (isinstance(value, (int, float)) and value in neutral):
            fields.fail(key, f"{brief(value)} asks for what no model here can express")
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UsageError(f"{header.path}: tensor 'token_embd.weight' is missing, or no table")
    heads = fields.whole("attention.head_count")
    sizes = {
        "hidden_size": fields.whole("embedding_length"),
        "intermediate_size": fields.whole("feed_forward_length"),
        "num_hidden_layers": fields.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.whole("attention.head_count_kv", heads),
        "head_dim": fields.whole("attention.key_length", 0),
    }
    _check_sizes(header, sizes)
    architecture = ARCHITECTURES[name]
    biases = {
        key: f"blk.0.{tensor}" in header.tensors
        for key, tensor in architecture.optional_biases.items()
    }
    try:
        config = ModelConfig(
            vocab_size=table.shape[0],
            max_position_embeddings=fields.whole("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10000.0),
            sliding_window=fields.whole("attention.sliding_window", 0) or None,
            tie_word_embeddings="output.weight" not in header.tensors,
            **sizes,
            **biases,
            **architecture.implies,
        )
        scaling = gguf_rope.read_rope_scaling(fields, config.head_dim, config.rope_theta)
        config = replace(config, rope_scaling=scaling)
    except UsageError as error:
        if str(error).startswith(f"{header.path}: "):
            raise
        raise UsageError(f"{header.path}: {error}") from error
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.whole(key, config.head_dim) != config.head_dim:
            fields.fail(key, f"is not head_dim={config.head_dim}, which no model here can express")
    return config


def config_entries(name: str, config: ModelConfig) -> dict[str, Any]:
    """Metadata, with the architecture's prefix, that `read_config` and llama.cpp read back."""
    entries = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope_theta),
        "attention.sliding_window": config.sliding_window,
        **gguf_rope.rope_scaling_entries(config)[0],
    }
    return {f"{name}.{key}": value for key, value in entries.items() if value is not None}


def _check_sizes(header: GGUFHeader, sizes: dict[str, int]) -> None:
    """Refuse a config that its tensors cannot belong to, before anything of its size is made."""
    largest = max(max(info.shape) for info in header.tensors.values())
    bounds = {name: largest for name in sizes} | {"num_hidden_layers": len(header.tensors)}
    for name, value in sizes.items():
        if value > bounds[name]:
            raise UsageError(
                f"{header.path}: {name}={value} is more than the file's tensors have "
                f"({bounds[name]})"
            )
