"""ModelConfig to and from the metadata of a GGUF file."""

from collections.abc import Callable
from dataclasses import fields as fields_of
from dataclasses import replace
from reprlib import repr as brief
from typing import Any, get_args

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.interop.gguf import rope
from jaxdist.interop.gguf.architectures import (
    ARCHITECTURES,
    DEFAULTS,
    KEYS,
    ROUTING,
    Architecture,
)
from jaxdist.interop.gguf.fields import REQUIRED, Fields
from jaxdist.interop.gguf.fit import implied_scalar
from jaxdist.interop.gguf.header import GGUFHeader

# Keys that change the arithmetic in ways their architecture's models do not have here, and what
# they may say; those that an architecture has are not looked up.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_gating_func": (0, 1),  # softmax
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (),
    "attention.temperature_scale": (0.0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.freq_base_swa": (),
    "use_parallel_residual": (False,),
}
# What is in no file is not as large: nothing of such a size is made before tensors are looked at.
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
    "n_shared_experts",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "v_head_dim",
)


def architecture_of(header: GGUFHeader) -> Architecture:
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
    architecture = ARCHITECTURES[name]
    if architecture.heads_apart and "blk.0.attn_kv_b.weight" in header.tensors:
        keys = {
            **architecture.keys,
            "head_dim": "attention.key_length",
            "v_head_dim": "attention.value_length",
        }
        return replace(architecture, heads_apart=False, keys=keys)
    return architecture


def read_config(header: GGUFHeader) -> ModelConfig:
    """The model that a file holds. UsageError, naming file and key, where ours differs from it."""
    architecture = architecture_of(header)
    fields = Fields(header, f"{architecture.name}.")
    _check_keys(architecture, fields)
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UsageError(f"{header.path}: tensor 'token_embd.weight' is missing, or no table")
    values = _values(architecture, fields)
    _check_sizes(header, values, architecture.implies.get("position_embedding") == "learned")
    if "kv_lora_rank" in architecture.keys:
        values["qk_nope_head_dim"] = values.pop("head_dim") - values["qk_rope_head_dim"]
        del values["num_key_value_heads"]  # in the file that of the latent, which is one
    biases = {
        field: f"blk.0.{tensor}" in header.tensors
        for field, tensor in architecture.optional_biases.items()
    }
    tied = "output.weight" not in header.tensors
    try:
        config = ModelConfig(
            **{
                "vocab_size": table.shape[0],
                "tie_word_embeddings": tied,
                **values,
                **biases,
                **architecture.implies,
            }
        )
        if architecture.wide_layers:
            scalar = implied_scalar(architecture, config)
            config = replace(config, query_pre_attn_scalar=scalar)
        scaling = rope.read_rope_scaling(fields, config)
        if scaling is not None and scaling["rope_type"] not in architecture.scalings:
            fields.fail("rope.scaling.type", f"{scaling['rope_type']!r} is not known with it")
        config = replace(config, rope_scaling=scaling)
    except UsageError as error:
        if str(error).startswith(f"{header.path}: "):
            raise
        raise UsageError(f"{header.path}: {error}") from error
    for key in () if config.kv_lora_rank else ("attention.value_length", "rope.dimension_count"):
        if fields.whole(key, config.head_dim) != config.head_dim:
            fields.fail(key, f"is not head_dim={config.head_dim}, which no model here can express")
    return config


def config_entries(architecture: Architecture, config: ModelConfig) -> dict[str, Any]:
    """Metadata, with the architecture's prefix, that `read_config` and llama.cpp read back."""
    keys = {**KEYS, **architecture.keys}
    for field in _moot(config):
        keys.pop(field, None)
    found: dict[str, Any] = {"vocab_size": config.vocab_size}
    for field, key in keys.items():
        value: Any = getattr(config, field)
        if value is None and architecture.defaults.get(field) is not None:
            value = 0  # or it would be taken for what is not said
        if value is not None and READERS[field] is Fields.number:
            value = float(value)
        found[key] = value
    if config.kv_lora_rank:
        # To the cache of those that multiply queries with the latent itself, it is the one head.
        found["attention.head_count_kv"] = 1
        found["attention.key_length"] = config.kv_lora_rank + config.qk_rope_head_dim
        found["attention.value_length"] = config.kv_lora_rank
    else:
        found["attention.value_length"] = config.head_dim
    if config.position_embedding == "rope":
        found["rope.dimension_count"] = config.rotary_dim
        found |= rope.rope_scaling_entries(config)[0]
    found |= architecture.constants
    return {f"{architecture.name}.{k}": value for k, value in found.items() if value is not None}


def _moot(config: ModelConfig) -> set[str]:
    """Fields that say nothing of this model."""
    found = set()
    if config.num_experts == 0:
        found |= set(ROUTING)
    if config.sliding_window is None:
        found |= {"sliding_window_pattern", "rope_local_base_freq"}
    if config.position_embedding != "rope":
        found.add("rope_theta")
    return found


def _values(architecture: Architecture, fields: Fields) -> dict[str, Any]:
    """What the keys of the architecture say, by our fields."""
    keys = {**KEYS, **architecture.keys}
    if not fields.whole("expert_count", 0):
        keys = {field: key for field, key in keys.items() if field not in ROUTING}
    defaults = {**DEFAULTS, **architecture.defaults}
    found = {}
    for field, key in keys.items():
        value = READERS[field](fields, key, defaults.get(field, REQUIRED))
        found[field] = value or (None if field in OPTIONAL else value)
    if "sliding_window" in found and found["sliding_window"] is None:
        found.pop("sliding_window_pattern", None)
        found.pop("rope_local_base_freq", None)
    return found


def _check_keys(architecture: Architecture, fields: Fields) -> None:
    """Refuse what a file asks for that its models do not have here."""
    own = {**KEYS, **architecture.keys}.values()
    said = fields.header.metadata
    for key, neutral in NEUTRAL.items():
        value = said.get(fields.prefix + key)
        if key in own or key in architecture.constants or value is None:
            continue
        if not (isinstance(value, (int, float)) and value in neutral):
            fields.fail(key, f"{brief(value)} asks for what no model here can express")
    for key, value in architecture.constants.items():
        if fields.whole(key, 0) != value:
            fields.fail(key, f"is not {value}, which all models have that are known here")


def _check_sizes(header: GGUFHeader, values: dict[str, Any], learned: bool) -> None:
    """Refuse a config that its tensors cannot belong to, before anything of its size is made."""
    largest = max(max(info.shape) for info in header.tensors.values())
    bounds = {name: largest for name in SIZES} | {"num_hidden_layers": len(header.tensors)}
    if learned:
        bounds["max_position_embeddings"] = largest
    for name, bound in bounds.items():
        if values.get(name, 0) > bound:
            raise UsageError(
                f"{header.path}: {name}={values[name]} is more than the file's tensors have "
                f"({bound})"
            )


def _reader(kinds: tuple[Any, ...]) -> Callable[..., Any]:
    if bool in kinds:
        return Fields.flag
    return Fields.whole if int in kinds else Fields.number


_KINDS = {field.name: get_args(field.type) or (field.type,) for field in fields_of(ModelConfig)}
READERS = {name: _reader(kinds) for name, kinds in _KINDS.items()}
OPTIONAL = {name for name, kinds in _KINDS.items() if type(None) in kinds}
