"""The architectures of GGUF that our decoder can express: a table, and where each weight lies.

A tensor of block i is named `blk.i.<base>.weight` (or `.bias`) and stored by outputs, [out, in];
ours are [in, out]. To add an architecture whose arithmetic the model knows, add an entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.interop.leaves import STACK, leaf_shapes

Modules = Mapping[str, tuple[str, ...]]  # base -> our modules of a block, joined by outputs

ATTENTION: Modules = {
    "attn_norm": ("input_layernorm",),
    "attn_q": ("self_attn/q_proj",),
    "attn_k": ("self_attn/k_proj",),
    "attn_v": ("self_attn/v_proj",),
    "attn_output": ("self_attn/o_proj",),
}
MLP: Modules = {
    "ffn_norm": ("post_attention_layernorm",),
    "ffn_gate": ("mlp/gate_proj",),
    "ffn_up": ("mlp/up_proj",),
    "ffn_down": ("mlp/down_proj",),
}
QK_NORM: Modules = {
    "attn_q_norm": ("self_attn/q_norm",),
    "attn_k_norm": ("self_attn/k_norm",),
}
FUSED: Modules = {
    "attn_norm": ("input_layernorm",),
    "attn_qkv": ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj"),
    "attn_output": ("self_attn/o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn_up": ("mlp/gate_proj", "mlp/up_proj"),
    "ffn_down": ("mlp/down_proj",),
}
OUTSIDE = {
    "embed_tokens": "token_embd.weight",
    "norm/weight": "output_norm.weight",
    "norm/bias": "output_norm.bias",
    "lm_head": "output.weight",
}
GATED_RMS = {"norm": "rmsnorm", "mlp": "swiglu"}
NO_BIAS = {"qkv_bias": False, "attention_output_bias": False, "mlp_bias": False}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`.

    Attributes:
        modules: Its tensors of a block.
        implies: Fields of ModelConfig that every model of it has.
        optional_biases: Fields of ModelConfig, each told by whether block 0 has the tensor.
        interleaved: Whether RoPE turns neighbouring rows of q and k, (0, 1), (2, 3)..., where ours
            turns row r with row r + R; its files hold the rows of each head in that order.
    """

    modules: Modules
    implies: Mapping[str, Any]
    optional_biases: Mapping[str, str] = field(default_factory=dict)
    interleaved: bool = False


ARCHITECTURES = {
    # Llama 1 to 3, SmolLM2, Mistral, and whatever else was converted to its names.
    "llama": Architecture(
        modules=ATTENTION | MLP,
        implies=GATED_RMS | {"qk_norm": False},
        optional_biases={
            "qkv_bias": "attn_q.bias",
            "attention_output_bias": "attn_output.bias",
            "mlp_bias": "ffn_gate.bias",
        },
        interleaved=True,
    ),
    "qwen2": Architecture(
        modules=ATTENTION | MLP, implies=GATED_RMS | NO_BIAS | {"qkv_bias": True, "qk_norm": False}
    ),
    "qwen3": Architecture(
        modules=ATTENTION | QK_NORM | MLP, implies=GATED_RMS | NO_BIAS | {"qk_norm": True}
    ),
    "phi3": Architecture(modules=FUSED, implies=GATED_RMS | NO_BIAS | {"qk_norm": False}),
}
# For writing, best first: the more special names are known to more programs as what they are.
WRITTEN = ("qwen3", "qwen2", "llama")


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of our weights (or one layer of a stack) lies in a file."""

    tensor: str  # `{layer}` stands for the layer's number
    start: int = 0  # outputs [start, stop) of the tensor
    stop: int
    joined: int = 1  # how many of ours share the tensor
    transposed: bool = False  # ours is [in, out]
    interleaved_heads: int = 0  # heads whose rows are interleaved


def architecture_for(config: ModelConfig) -> str:
    """The architecture that a config is written as. UsageError where none can express it."""
    for name in WRITTEN:
        implied = ARCHITECTURES[name].implies
        if all(getattr(config, key) == value for key, value in implied.items()):
            return name
    raise UsageError(
        f"no GGUF architecture of {', '.join(WRITTEN)} expresses norm={config.norm}, "
        f"mlp={config.mlp}, qk_norm={config.qk_norm}, qkv_bias={config.qkv_bias}, "
        f"attention_output_bias={config.attention_output_bias}, mlp_bias={config.mlp_bias}; "
        "write a Hugging Face folder"
    )


def places(name: str, config: ModelConfig) -> dict[str, Place]:
    """By our names, in the model's order. UsageError where the architecture lacks a weight."""
    architecture, shapes = ARCHITECTURES[name], leaf_shapes(config)
    found = {}
    for leaf, shape in shapes.items():
        if leaf in OUTSIDE:
            found[leaf] = Place(tensor=OUTSIDE[leaf], stop=shape[0])
        else:
            found[leaf] = _place_in_block(name, architecture, config, leaf, shapes)
    return found


def _place_in_block(
    name: str,
    architecture: Architecture,
    config: ModelConfig,
    leaf: str,
    shapes: Mapping[str, tuple[int, ...]],
) -> Place:
    module, _, kind = leaf.removeprefix(STACK).rpartition("/")
    homes = [home for home in architecture.modules.items() if module in home[1]]
    if not homes:
        raise UsageError(f"the GGUF architecture {name} has no tensor for the weight {leaf}")
    base, modules = homes[0]
    outputs = [shapes[f"{STACK}{other}/{kind}"][-1] for other in modules]
    index = modules.index(module)
    heads = 0
    if architecture.interleaved and module == "self_attn/q_proj":
        heads = config.num_attention_heads
    elif architecture.interleaved and module == "self_attn/k_proj":
        heads = config.num_key_value_heads
    return Place(
        tensor=f"blk.{{layer}}.{base}.{kind}",
        start=sum(outputs[:index]),
        stop=sum(outputs[: index + 1]),
        joined=len(modules),
        transposed=len(shapes[leaf]) == 3,
        interleaved_heads=heads,
    )


def tensor_shapes(name: str, config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape, in numpy's order, of every tensor that a file of this model holds."""
    shapes, found = leaf_shapes(config), {}
    for leaf, place in places(name, config).items():
        shape = shapes[leaf]
        if not leaf.startswith(STACK):
            found[place.tensor] = shape
            continue
        for layer in range(config.num_hidden_layers):
            tensor = place.tensor.format(layer=layer)
            # The last of those that are joined has the whole height.
            found[tensor] = (place.stop, *shape[1:-1])
    return found
