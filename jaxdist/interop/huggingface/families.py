"""The families of Hugging Face models that our decoder expresses: a table of names.

Our fields carry Hugging Face's names, so a family says only where it differs: which settings all
its models share, what config.json means where it is silent, and which tensors hold what. A new
family whose arithmetic the model knows is one more entry.
"""

from jaxdist.interop.huggingface.family import BLOCK, MLP, STANDARD, Family, Modules

SANDWICH: Modules = {
    **STANDARD,
    **{name: (name,) for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm")},
}
ROUTED: Modules = {**STANDARD, "mlp.gate": ("mlp/gate",)}
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
