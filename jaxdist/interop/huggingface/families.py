"""The families of Hugging Face models that our decoder expresses: a table of names.

Our fields carry Hugging Face's names, so a family says only where it differs: which settings all
its models share, what config.json means where it is silent, and which tensors hold what. A new
family whose arithmetic the model knows is one more entry.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean

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
SANDWICH: Modules = {
    **STANDARD,
    **{name: (name,) for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")},
}
ROUTED: Modules = STANDARD | {"mlp.gate": ("mlp/gate",)}
LATENT = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm")
GPT2: Modules = {
    "ln_1": ("input_layernorm",),
    "attn.c_attn": ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj"),
    "attn.c_proj": ("self_attn/o_proj",),
    "ln_2": ("post_attention_layernorm",),
    "mlp.c_fc": ("mlp/up_proj",),
    "mlp.c_proj": ("mlp/down_proj",),
}
EXPERTS = {
    f"mlp/experts/{name}": f"mlp.experts.{{expert}}.{name}.weight"
    for name in ("gate_proj", "up_proj", "down_proj")
}
GEMMA = {
    "norm": "rmsnorm1p",
    "norm_order": "sandwich",
    "mlp": "geglu",
    "scale_embeddings": True,
}
# What any model may have its own value of; every other field is its family's matter.
FREE = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "sliding_window",
    "sliding_window_pattern",
    "rope_theta",
    "rope_scaling",
    "tie_word_embeddings",
    "initializer_range",
    "vocab_multiple",
    "preset",
}
BASE_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}


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


BIAS = {"qkv_bias": "attention_bias", "attention_output_bias": "attention_bias"}
ONE_BIAS = {"attention_bias": (False,)}
CAUSAL = {"use_bidirectional_attention": (None, False)}
TANH_GELU = ("hidden_activation", "gelu_pytorch_tanh", "gelu_new")

# In the order in which a config that several could hold is written.
FAMILIES = {
    "Qwen3ForCausalLM": Family(
        model_type="qwen3",
        implies={"qk_norm": True},
        switches=BIAS,
        defaults={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
        window="by switch",
    ),
    "Qwen2ForCausalLM": Family(
        model_type="qwen2",
        implies={"qkv_bias": True},
        defaults={"num_key_value_heads": 32, "max_position_embeddings": 32768},
        window="by switch",
    ),
    # Llama 1 to 3, SmolLM2, and whatever else goes by its names.
    "LlamaForCausalLM": Family(
        model_type="llama",
        implies={},
        switches=BIAS | {"mlp_bias": "mlp_bias"},
        defaults={"max_position_embeddings": 2048},
    ),
    "MistralForCausalLM": Family(
        model_type="mistral",
        implies={},
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "sliding_window": 4096,
        },
        window="by size",
    ),
    "Phi3ForCausalLM": Family(
        model_type="phi3",
        implies={},
        defaults={
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
        },
        window="by size",
        modules={
            **{name: (name,) for name in BLOCK},
            "self_attn.qkv_proj": ("self_attn/q_proj", "self_attn/k_proj", "self_attn/v_proj"),
            "self_attn.o_proj": ("self_attn/o_proj",),
            "mlp.gate_up_proj": ("mlp/gate_proj", "mlp/up_proj"),
            "mlp.down_proj": ("mlp/down_proj",),
        },
    ),
    "Olmo2ForCausalLM": Family(
        model_type="olmo2",
        implies={"norm_order": "post", "qk_norm": True, "qk_norm_width": "all"},
        switches=BIAS,
        defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        modules=SANDWICH,
    ),
    "Gemma2ForCausalLM": Family(
        model_type="gemma2",
        implies=GEMMA,
        keys={
            name: name
            for name in (
                "query_pre_attn_scalar",
                "attn_logit_softcapping",
                "final_logit_softcapping",
            )
        },
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        neutral=ONE_BIAS | CAUSAL,
        activation=TANH_GELU,
        window="by layer",
        pattern=2,
        modules=SANDWICH,
    ),
    "Gemma3ForCausalLM": Family(
        model_type="gemma3_text",
        implies=GEMMA | {"qk_norm": True},
        keys={
            name: name
            for name in (
                "query_pre_attn_scalar",
                "attn_logit_softcapping",
                "final_logit_softcapping",
                "rope_local_base_freq",
            )
        },
        defaults={
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
        },
        neutral=ONE_BIAS | CAUSAL,
        activation=TANH_GELU,
        window="by layer",
        pattern=6,
        modules=SANDWICH,
    ),
    "GPT2LMHeadModel": Family(
        model_type="gpt2",
        implies={
            "norm": "layernorm",
            "mlp": "gelu",
            "qkv_bias": True,
            "attention_output_bias": True,
            "mlp_bias": True,
            "position_embedding": "learned",
        },
        keys={
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "n_positions",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        defaults={"n_positions": 1024, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        neutral={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,)},
        activation=("activation_function", "gelu_new", "gelu_pytorch_tanh"),
        modules=GPT2,
        outside={
            "embed_tokens": "transformer.wte.weight",
            "embed_positions": "transformer.wpe.weight",
            "norm/weight": "transformer.ln_f.weight",
            "norm/bias": "transformer.ln_f.bias",
            "lm_head": "lm_head.weight",
        },
        layers="transformer.h.{layer}.",
        by_outputs=False,
        buffers=(".attn.bias", ".attn.masked_bias"),
    ),
    "MixtralForCausalLM": Family(
        model_type="mixtral",
        implies={"norm_topk_prob": True},
        keys={
            "num_experts": "num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok",
            "router_aux_loss_coef": "router_aux_loss_coef",
        },
        defaults={
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096 * 32,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "router_aux_loss_coef": 0.001,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        window="by size",
        modules={
            **STANDARD,
            "block_sparse_moe.gate": ("mlp/gate",),
        },
        experts={
            f"mlp/experts/{ours}": f"block_sparse_moe.experts.{{expert}}.{theirs}.weight"
            for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        model_type="qwen3_moe",
        implies={"qk_norm": True},
        switches={**BIAS, "norm_topk_prob": "norm_topk_prob"},
        keys={
            name: name
            for name in (
                "num_experts",
                "num_experts_per_tok",
                "moe_intermediate_size",
                "router_aux_loss_coef",
            )
        },
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "router_aux_loss_coef": 0.001,
        },
        renamed={"num_local_experts": "num_experts"},
        neutral={"decoder_sparse_step": (1,), "mlp_only_layers": (None, [])},
        window="by switch",
        modules=ROUTED,
        experts=EXPERTS,
    ),
    "DeepseekV3ForCausalLM": Family(
        model_type="deepseek_v3",
        implies={"scoring_func": "sigmoid"},
        switches={"norm_topk_prob": "norm_topk_prob"},
        keys={
            "num_experts": "n_routed_experts",
            **{
                name: name
                for name in (
                    "num_experts_per_tok",
                    "moe_intermediate_size",
                    "n_group",
                    "topk_group",
                    "routed_scaling_factor",
                    "n_shared_experts",
                    "first_k_dense_replace",
                    "kv_lora_rank",
                    "q_lora_rank",
                    "qk_nope_head_dim",
                    "qk_rope_head_dim",
                    "v_head_dim",
                    "router_aux_loss_coef",
                )
            },
        },
        defaults={
            "max_position_embeddings": 4096,
            "router_aux_loss_coef": 0.0,
            "norm_topk_prob": True,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
        },
        renamed={"num_local_experts": "n_routed_experts"},
        neutral=ONE_BIAS | {"rope_interleave": (True,), "topk_method": (None, "noaux_tc")},
        modules={
            **ROUTED,
            **{f"self_attn.{name}": (f"self_attn/{name}",) for name in (*LATENT, "kv_b_proj")},
            **{f"mlp.shared_experts.{name}": (f"mlp/shared_experts/{name}",) for name in MLP},
        },
        experts=EXPERTS,
    ),
}


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
    return not _differing(family, config)


def _differing(family: Family, config: ModelConfig) -> list[str]:
    """The fields of a config that a family's models cannot have as they are."""
    switched: dict[str, set[bool]] = {}
    for name, key in family.switches.items():
        switched.setdefault(key, set()).add(getattr(config, name))
    wrong = [n for n, value in family.implies.items() if getattr(config, n) != value]
    wrong += [n for n, key in family.switches.items() if len(switched[key]) > 1]
    wrong += [
        f.name
        for f in fields(ModelConfig)
        if f.name not in FREE | family.named and getattr(config, f.name) != f.default
    ]
    if bool(config.num_experts) != ("num_experts" in family.keys):
        wrong.append("num_experts")
    square = (config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    if config.position_embedding == "learned":
        wrong += [
            name
            for name, value in zip(("num_key_value_heads", "head_dim"), square, strict=True)
            if getattr(config, name) != value
        ]
    if config.sliding_window is not None and family.window == "never":
        wrong.append("sliding_window")
    if config.sliding_window_pattern is not None and family.window != "by layer":
        wrong.append("sliding_window_pattern")
    return wrong


def architecture_for(config: ModelConfig, preferred: Any = None) -> str:
    """The architecture a config is written as, `preferred` if it can be."""
    for name in (preferred, *FAMILIES):
        if name in FAMILIES and expresses(FAMILIES[name], config):
            return name
    # Said as what hinders the family that comes nearest.
    name = min(FAMILIES, key=lambda name: len(_differing(FAMILIES[name], config)))
    given = ", ".join(f"{n}={getattr(config, n)}" for n in _differing(FAMILIES[name], config))
    raise UsageError(
        f"no architecture of {', '.join(FAMILIES)} expresses this model (of {name} what differs "
        f"is {given}); such a model stays in its run's folder"
    )
