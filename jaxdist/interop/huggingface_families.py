"""The families of Hugging Face models that our decoder expresses: a table of names.

Our fields carry Hugging Face's names, so a family says only where it differs: which settings all
its models share, what config.json means where it is silent, and which tensors hold what. A new
family whose arithmetic the model knows is one more entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.interop.leaves import STACK, leaf_shapes

Modules = Mapping[str, tuple[str, ...]]  # their module of a block -> ours, joined by outputs

BLOCK = ("input_layernorm", "post_attention_layernorm")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
STANDARD: Modules = {
    **{name: (name,) for name in BLOCK},
    **{f"self_attn.{name}": (f"self_attn/{name}",) for name in ATTENTION},
    **{f"mlp.{name}": (f"mlp/{name}",) for name in MLP},
}
OUTSIDE = {
    "embed_tokens": "model.embed_tokens.weight",
    "norm/weight": "model.norm.weight",
    "norm/bias": "model.norm.bias",
    "lm_head": "lm_head.weight",
}
GATED_RMS = {"norm": "rmsnorm", "mlp": "swiglu"}
PLAIN = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False, "qk_norm": False}
BASE_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One value of `architectures` in config.json.

    Attributes:
        model_type: The value of `model_type` that goes with it.
        implies: Fields of ModelConfig that every model of it has.
        switches: Fields of ModelConfig -> the key of config.json that turns them on.
        defaults: What a key that is missing from config.json means.
        window: Whether its models attend to a sliding window: "never", "by size" (where
            sliding_window is not null) or "by switch" (where use_sliding_window also says so).
        modules: Its tensors of a block, `<layers><module>.weight` and `.bias`.
        outside: Our weights outside of the blocks -> its tensors.
        layers: Prefix of a block's tensors.
        by_outputs: Whether its matrices are stored [out, in]; ours are [in, out].
    """

    model_type: str
    implies: Mapping[str, Any]
    switches: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    window: str = "never"
    modules: Modules = field(default_factory=lambda: STANDARD)
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers.{layer}."
    by_outputs: bool = True


# In the order in which a config that several could hold is written.
FAMILIES = {
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        implies=GATED_RMS | {"mlp_bias": False, "qk_norm": True},
        switches={"qkv_bias": "attention_bias", "attention_output_bias": "attention_bias"},
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        window="by switch",
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        implies=GATED_RMS | PLAIN | {"qkv_bias": True},
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        window="by switch",
    ),
    # Llama 1 to 3, SmolLM2, and whatever else goes by its names.
    "LlamaForCausalLM": Family(
        model_type="llama",
        implies=GATED_RMS | {"qk_norm": False},
        switches={
            "qkv_bias": "attention_bias",
            "attention_output_bias": "attention_bias",
            "mlp_bias": "mlp_bias",
        },
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        implies=GATED_RMS | PLAIN,
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        window="by size",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of our weights (or one layer of a stack) lies in a folder's tensors."""

    tensor: str  # `{layer}` stands for the layer's number
    start: int = 0  # outputs [start, stop) of the tensor
    stop: int
    outputs_first: bool = True  # the outputs are the tensor's first dim, else its last
    transposed: bool = False  # ours is [in, out], theirs [out, in]


def family_of(architecture: Any, where: str) -> Family:
    """The family by its name; UsageError where it is not in the table."""
    if architecture not in FAMILIES:
        hint = did_you_mean(architecture, FAMILIES) if isinstance(architecture, str) else ""
        raise UsageError(
            f"{where}: the architecture {architecture!r} is not one of {', '.join(FAMILIES)}{hint}"
        )
    return FAMILIES[architecture]


def expresses(family: Family, config: ModelConfig) -> bool:
    """Whether a config can be written as a model of this family."""
    switched: dict[str, set[bool]] = {}
    for name, key in family.switches.items():
        switched.setdefault(key, set()).add(getattr(config, name))
    return (
        all(getattr(config, name) == value for name, value in family.implies.items())
        and all(len(values) == 1 for values in switched.values())
        and (config.sliding_window is None or family.window != "never")
    )


def architecture_for(config: ModelConfig, preferred: Any = None) -> str:
    """The architecture a config is written as, `preferred` if it can be."""
    for name in (preferred, *FAMILIES):
        if name in FAMILIES and expresses(FAMILIES[name], config):
            return name
    names = (*GATED_RMS, *PLAIN, "sliding_window")
    given = ", ".join(f"{name}={getattr(config, name)}" for name in names)
    raise UsageError(
        f"no architecture of {', '.join(FAMILIES)} expresses a model with {given}; "
        "such a model stays in its run's folder"
    )


def places(family: Family, config: ModelConfig) -> dict[str, Place]:
    """Where each of our weights lies, by our names in the model's order."""
    shapes = leaf_shapes(config)
    homes = {
        ours: (theirs, together) for theirs, together in family.modules.items() for ours in together
    }
    found = {}
    for leaf, shape in shapes.items():
        if leaf in family.outside:
            found[leaf] = Place(tensor=family.outside[leaf], stop=shape[0])
            continue
        module, _, kind = leaf.removeprefix(STACK).rpartition("/")
        theirs, together = homes[module]
        outputs = [shapes[f"{STACK}{other}/{kind}"][-1] for other in together]
        index = together.index(module)
        matrix = len(shape) == 3
        found[leaf] = Place(
            tensor=f"{family.layers}{theirs}.{kind}",
            start=sum(outputs[:index]),
            stop=sum(outputs[: index + 1]),
            outputs_first=family.by_outputs or not matrix,
            transposed=family.by_outputs and matrix,
        )
    return found


def tensor_shapes(family: Family, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a model: what is outside of the blocks, then layer by layer."""
    shapes = leaf_shapes(config)
    outside, block = {}, {}
    for leaf, place in places(family, config).items():
        if not leaf.startswith(STACK):
            outside[place.tensor] = shapes[leaf]
        elif len(shapes[leaf]) == 3:
            inputs = shapes[leaf][1]
            joined = (place.stop, inputs) if place.outputs_first else (inputs, place.stop)
            block[place.tensor] = max(block.get(place.tensor, joined), joined)
        else:
            block[place.tensor] = max(block.get(place.tensor, (0,)), (place.stop,))
    layers = range(config.num_hidden_layers)
    return outside | {
        tensor.format(layer=layer): shape for layer in layers for tensor, shape in block.items()
    }
