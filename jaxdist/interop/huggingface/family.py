"""What is said of a family of Hugging Face models: its settings, keys and names of tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True, kw_only=True)
class Family:
    """One value of `architectures` in config.json.

    A field of ModelConfig that is neither free (`FREE`) nor named here has its default.

    Attributes:
        model_type: The value of `model_type` that goes with it.
        implies: Fields of ModelConfig that every model of it has.
        switches: Fields of ModelConfig -> the key of config.json that turns them on.
        keys: Fields of ModelConfig -> the key of config.json that holds them, where the names
            differ or the field is not one that all families have.
        renamed: Keys by which some versions of transformers write others.
        defaults: What a key that is missing from config.json means.
        neutral: Keys that change the arithmetic, and what they may say.
        activation: The key of the activation and what it may be; the first is written.
        window: Whether its models attend to a sliding window: "never", "by size" (where
            sliding_window is not null), "by switch" (where use_sliding_window also says so) or
            "by layer" (where layer_types says so).
        pattern: How far full layers are apart where config.json does not say.
        modules: Its tensors of a block, `<layers><module>.weight` and `.bias`.
        experts: Our stacks of experts -> the tensor of one.
        outside: Our weights outside of the blocks -> its tensors.
        layers: Prefix of a block's tensors.
        by_outputs: Whether its matrices are stored [out, in]; ours are [in, out].
        buffers: Ends of the names of tensors that old versions saved and nothing reads.
    """

    model_type: str
    implies: Mapping[str, Any]
    switches: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    activation: tuple[str, ...] = ("hidden_act", "silu", "swish")
    window: str = "never"
    pattern: int | None = None
    modules: Modules = field(default_factory=lambda: STANDARD)
    experts: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers.{layer}."
    by_outputs: bool = True
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)

    def key(self, name: str) -> str:
        """What config.json calls a field of ModelConfig."""
        return self.keys.get(name, name)

    @property
    def named(self) -> set[str]:
        """Fields of ModelConfig that it speaks of."""
        return {*self.implies, *self.switches, *self.keys}
