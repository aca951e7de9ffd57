"""The architectures of GGUF that our decoder can express: a table.

A tensor of block i is named `blk.i.<base>.weight` (or `.bias`) and stored by outputs, [out, in];
ours are [in, out]. An architecture says only where it differs: which settings all its models share,
which keys of the metadata it has, and which tensors hold what. To add one whose arithmetic the
model knows, add an entry. Source: llama.cpp's converter and its readers (conversion/, src/models/).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
POST_NORMS: Modules = {
    "post_attention_norm": ("post_attention_layernorm",),
    "post_ffw_norm": ("post_feedforward_layernorm",),
}
SANDWICH: Modules = ATTENTION | MLP | POST_NORMS | {"ffn_norm": ("pre_feedforward_layernorm",)}
FUSED: Modules = {"attn_qkv": ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj")}
ROUTED: Modules = {"ffn_gate_inp": ("mlp/gate",)}
LATENT: Modules = {
    "attn_q_a": ("self_attn/q_a_proj",),
    "attn_q_a_norm": ("self_attn/q_a_layernorm",),
    "attn_q_b": ("self_attn/q_b_proj",),
    "attn_kv_a_mqa": ("self_attn/kv_a_proj_with_mqa",),
    "attn_kv_a_norm": ("self_attn/kv_a_layernorm",),
    "attn_kv_b": ("self_attn/kv_b_proj",),
}
SHARED: Modules = {
    f"ffn_{name}_shexp": (f"mlp/shared_experts/{name}_proj",) for name in ("gate", "up", "down")
}
OUTSIDE = {
    "embed_tokens": "token_embd.weight",
    "embed_positions": "position_embd.weight",
    "norm/weight": "output_norm.weight",
    "norm/bias": "output_norm.bias",
    "lm_head": "output.weight",
}
EXPERTS = {f"mlp/experts/{name}_proj": f"ffn_{name}_exps" for name in ("gate", "up", "down")}
WINDOW = {"sliding_window": "attention.sliding_window"}
PATTERN = {"sliding_window_pattern": "attention.sliding_window_pattern"}
CAPS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
ROUTING = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
GEMMA = {
    "norm": "rmsnorm1p",
    "norm_order": "sandwich",
    "mlp": "geglu",
    "scale_embeddings": True,
}
# Fields of ModelConfig -> their keys, unless an architecture says another.
KEYS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
# What a key that is missing means.
DEFAULTS = {
    "num_key_value_heads": 0,
    "head_dim": 0,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "num_experts": 0,
}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One value of `general.architecture`.

    A field of ModelConfig that is neither free (`fit.FREE`) nor named here has its default.

    Attributes:
        name: The value.
        modules: Its tensors of a block; of two that hold a module of ours the later counts.
        implies: Fields of ModelConfig that every model of it has.
        keys: Fields of ModelConfig -> its keys, beyond `KEYS` or in their place.
        defaults: What a key means that is missing from a file, beyond `DEFAULTS`.
        needs: Fields without which its readers make no model.
        constants: Keys that say the same in all files we know.
        optional_biases: Fields of ModelConfig, each told by whether block 0 has the tensor.
        experts: Our stacks of experts -> the base of their tensor, [experts, out, in].
        scalings: Kinds of RoPE scaling that its readers know.
        interleaved: Whether RoPE turns neighbouring rows of q and k, (0, 1), (2, 3)..., where ours
            turns row r with row r + R; its files hold the rows of each head in that order.
        gains_from_one: Whether its files hold 1 + the norms' weights.
        wide_layers: Number of layers of its one size that divides scores by the root of
            hidden_size / heads, where the others take that of head_dim; 0 if not told by layers.
        square: Whether its heads are together as wide as the model.
        heads_apart: Whether what latent attention makes of its latent are two tensors, one of keys
            and one of values, as in files since 2025.
    """

    name: str
    modules: Modules
    implies: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    constants: Mapping[str, Any] = field(default_factory=dict)
    optional_biases: Mapping[str, str] = field(default_factory=dict)
    experts: Mapping[str, str] = field(default_factory=dict)
    scalings: tuple[str, ...] = ("linear", "yarn")
    interleaved: bool = False
    gains_from_one: bool = False
    wide_layers: int = 0
    square: bool = False
    heads_apart: bool = False

    @property
    def named(self) -> set[str]:
        """Fields of ModelConfig that it speaks of."""
        told = {"query_pre_attn_scalar"} if self.wide_layers else set()
        if "kv_lora_rank" in self.keys:
            told.add("qk_nope_head_dim")  # the rest of head_dim
        return {*self.implies, *self.keys, *self.optional_biases, *told}

    def home(self, module: str) -> tuple[str, tuple[str, ...]]:
        """The base of the tensor that holds a module of ours, and all modules that it holds."""
        return [home for home in self.modules.items() if module in home[1]][-1]


_ALL = (
    # The more special come first: they are known to more programs as what they are.
    Architecture(
        name="qwen3",
        modules=ATTENTION | QK_NORM | MLP,
        implies={"qk_norm": True},
        keys=WINDOW,
    ),
    Architecture(name="qwen2", modules=ATTENTION | MLP, implies={"qkv_bias": True}, keys=WINDOW),
    # Llama 1 to 3, SmolLM2, Mistral, Mixtral, and whatever else was converted to its names.
    Architecture(
        name="llama",
        modules=ATTENTION | MLP | ROUTED,
        implies={},
        keys=WINDOW | ROUTING,
        optional_biases={
            "qkv_bias": "attn_q.bias",
            "attention_output_bias": "attn_output.bias",
            "mlp_bias": "ffn_gate.bias",
        },
        experts=EXPERTS,
        scalings=("linear", "yarn", "llama3", "longrope"),
        interleaved=True,
    ),
    Architecture(
        name="phi3",
        modules=ATTENTION | MLP | FUSED | {"ffn_up": ("mlp/gate_proj", "mlp/up_proj")},
        implies={},
        keys=WINDOW,
        scalings=("linear", "yarn", "longrope"),
        square=True,
    ),
    Architecture(
        name="qwen3moe",
        modules=ATTENTION | QK_NORM | MLP | ROUTED,
        implies={"qk_norm": True, "norm_topk_prob": True},
        keys=WINDOW | ROUTING | {"moe_intermediate_size": "expert_feed_forward_length"},
        needs=("num_experts", "moe_intermediate_size"),
        experts=EXPERTS,
    ),
    Architecture(
        name="olmo2",
        modules=ATTENTION | QK_NORM | MLP | POST_NORMS,
        implies={
            "norm_order": "post",
            "qk_norm": True,
            "qk_norm_width": "all",
            "tie_word_embeddings": False,
        },
        square=True,
    ),
    Architecture(
        name="gemma2",
        modules=SANDWICH,
        implies=GEMMA | {"tie_word_embeddings": True},
        keys=WINDOW | PATTERN | CAPS,
        defaults={
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        needs=("sliding_window", *CAPS),
        scalings=("linear",),
        gains_from_one=True,
        wide_layers=46,
    ),
    Architecture(
        name="gemma3",
        modules=SANDWICH | QK_NORM,
        implies=GEMMA | {"qk_norm": True},
        keys=WINDOW
        | PATTERN
        | {
            "final_logit_softcapping": "final_logit_softcapping",
            "rope_local_base_freq": "rope.freq_base_swa",
        },
        defaults={
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
            "rope_local_base_freq": 10000.0,
        },
        scalings=("linear",),
        gains_from_one=True,
        wide_layers=62,
    ),
    Architecture(
        name="gpt2",
        modules=ATTENTION | MLP | FUSED,
        implies={
            "norm": "layernorm",
            "mlp": "gelu",
            "qkv_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "position_embedding": "learned",
        },
        keys={"rms_norm_eps": "attention.layer_norm_epsilon"},
        scalings=(),
        square=True,
    ),
    # DeepSeek-V3. Earlier ones, which score by softmax, choose among groups in another way.
    Architecture(
        name="deepseek2",
        modules=ATTENTION | LATENT | MLP | ROUTED | SHARED,
        implies={"scoring_func": "sigmoid"},
        keys=ROUTING
        | {
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "n_group": "expert_group_count",
            "topk_group": "expert_group_used_count",
            "norm_topk_prob": "expert_weights_norm",
            "routed_scaling_factor": "expert_weights_scale",
            "first_k_dense_replace": "leading_dense_block_count",
            "q_lora_rank": "attention.q_lora_rank",
            "kv_lora_rank": "attention.kv_lora_rank",
            "qk_rope_head_dim": "rope.dimension_count",
            "head_dim": "attention.key_length_mla",
            "v_head_dim": "attention.value_length_mla",
        },
        defaults={
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 0,
            "q_lora_rank": 0,
        },
        needs=("num_experts", "moe_intermediate_size", "n_shared_experts", "kv_lora_rank"),
        constants={"expert_gating_func": 2},  # sigmoid
        experts=EXPERTS,
        scalings=("yarn",),
        heads_apart=True,
    ),
)
ARCHITECTURES: dict[str, Architecture] = {architecture.name: architecture for architecture in _ALL}
