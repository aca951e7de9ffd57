"""Rules of the less usual parts of a model: score scaling, windows, experts, latent attention."""

import math
from typing import TYPE_CHECKING

from jaxdist.config import limits
from jaxdist.config.errors import UsageError

if TYPE_CHECKING:
    from jaxdist.config.model import ModelConfig

LATENT = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def check_scores(model: "ModelConfig") -> None:
    """Refuse scales and caps that are not positive."""
    for name in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(model, name) is not None:
            limits.number(f"model.{name}", getattr(model, name), above=0)


def check_windows(model: "ModelConfig") -> None:
    """Refuse windows of no tokens, and fields that only count beside others."""
    if model.sliding_window is not None:
        limits.whole("model.sliding_window", model.sliding_window, 1)
    if model.sliding_window_pattern is not None:
        limits.whole("model.sliding_window_pattern", model.sliding_window_pattern, 2)
    if model.rope_local_base_freq is not None:
        limits.number("model.rope_local_base_freq", model.rope_local_base_freq, above=1)
    for name in ("sliding_window_pattern", "rope_local_base_freq"):
        if getattr(model, name) is not None and model.sliding_window is None:
            raise UsageError(
                f"model.{name}={getattr(model, name)} needs layers with a window; set "
                "--model.sliding_window"
            )


def check_experts(model: "ModelConfig") -> None:
    """Refuse experts that cannot be routed to."""
    limits.whole("model.num_experts", model.num_experts, 0)
    limits.whole("model.moe_intermediate_size", model.moe_intermediate_size, 0)
    limits.choice("model.scoring_func", model.scoring_func, ("softmax", "sigmoid"))
    limits.number("model.routed_scaling_factor", model.routed_scaling_factor, above=0)
    limits.number("model.router_aux_loss_coef", model.router_aux_loss_coef, 0)
    limits.whole("model.n_shared_experts", model.n_shared_experts, 0)
    limits.whole("model.first_k_dense_replace", model.first_k_dense_replace, 0)
    for name in ("num_experts_per_tok", "n_group", "topk_group"):
        limits.whole(f"model.{name}", getattr(model, name), 1)
    if model.num_experts == 0:
        for name in ("n_shared_experts", "first_k_dense_replace"):
            if getattr(model, name):
                raise UsageError(
                    f"model.{name}={getattr(model, name)} needs experts; set --model.num_experts"
                )
        return
    if model.mlp == "gelu" or model.mlp_bias:
        raise UsageError(
            f"model.mlp={model.mlp} with mlp_bias={model.mlp_bias} has no form with experts; "
            "choose swiglu or geglu, without biases"
        )
    if model.num_experts % model.n_group or model.topk_group > model.n_group:
        raise UsageError(
            f"model.n_group={model.n_group} must divide num_experts={model.num_experts} and be at "
            f"least topk_group={model.topk_group}"
        )
    in_groups = model.num_experts // model.n_group * model.topk_group
    if model.num_experts_per_tok > in_groups:
        raise UsageError(
            f"model.num_experts_per_tok={model.num_experts_per_tok} is more than the {in_groups} "
            "experts that a token may choose from"
        )
    if model.n_group > 1 and model.num_experts // model.n_group < 2:
        raise UsageError(
            f"model.n_group={model.n_group} leaves fewer than two experts a group, by which groups "
            f"are judged; choose at most {model.num_experts // 2}"
        )
    if model.first_k_dense_replace >= model.num_hidden_layers:
        raise UsageError(
            f"model.first_k_dense_replace={model.first_k_dense_replace} leaves none of the "
            f"{model.num_hidden_layers} layers with experts; choose less, or num_experts 0"
        )


def check_latent_attention(model: "ModelConfig") -> None:
    """Refuse widths of latent attention that are not there together."""
    for name in ("kv_lora_rank", "q_lora_rank", *LATENT):
        limits.whole(f"model.{name}", getattr(model, name), 0)
    if not model.kv_lora_rank:
        for name in ("q_lora_rank", *LATENT):
            if getattr(model, name):
                raise UsageError(
                    f"model.{name}={getattr(model, name)} belongs to latent attention; set "
                    "--model.kv_lora_rank, or leave it 0"
                )
        return
    for name in LATENT:
        if not getattr(model, name):
            raise UsageError(f"model.{name}=0, which latent attention (kv_lora_rank) needs")
    if model.qk_rope_head_dim % 2:
        raise UsageError(
            f"model.qk_rope_head_dim={model.qk_rope_head_dim} must be even, because RoPE rotates "
            f"pairs; choose {model.qk_rope_head_dim + 1}"
        )
    if model.num_key_value_heads not in (0, model.num_attention_heads):
        raise UsageError(
            f"model.num_key_value_heads={model.num_key_value_heads}: latent attention has "
            f"num_attention_heads={model.num_attention_heads} of them; leave it 0"
        )
    for name in ("qk_norm", "qkv_bias", "attention_output_bias"):
        if getattr(model, name):
            raise UsageError(f"model.{name}=true has no form with latent attention")
    if model.sliding_window is not None or model.position_embedding != "rope":
        raise UsageError(
            "latent attention (model.kv_lora_rank) has neither a sliding window nor learned "
            "positions"
        )


def attention_scale(model: "ModelConfig") -> float:
    """1 / sqrt(head_dim), or what the model says; YaRN sharpens latent attention once more."""
    scale = (model.query_pre_attn_scalar or model.head_dim) ** -0.5
    scaling = model.rope_scaling or {}
    weight = scaling.get("mscale_all_dim")
    if model.kv_lora_rank and weight and scaling.get("factor", 1) > 1:
        scale *= (0.1 * weight * math.log(scaling["factor"]) + 1) ** 2
    return scale
