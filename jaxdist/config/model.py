"""The shape of a decoder-only transformer, in Hugging Face's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.config import limits, model_parts, rope_scaling
from jaxdist.config.errors import UsageError
from jaxdist.config.presets import load_preset

NORMS = ("rmsnorm", "rmsnorm1p", "layernorm")
NORM_ORDERS = ("pre", "post", "sandwich")
MLPS = ("swiglu", "geglu", "gelu")
FLAGS = (
    "qkv_bias",
    "attention_output_bias",
    "mlp_bias",
    "qk_norm",
    "tie_word_embeddings",
    "scale_embeddings",
    "norm_topk_prob",
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: embedding, blocks of attention and MLP (or experts), final norm, head.

    Attributes:
        vocab_size: Number of tokens; ids reach from 0 to vocab_size - 1.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP's hidden layer.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads; 0 takes num_attention_heads.
        head_dim: Width of one head; 0 takes hidden_size / num_attention_heads.
        max_position_embeddings: Longest sequence, in tokens, that the positions are made for.
        norm: rmsnorm, rmsnorm1p (its gain is 1 + the weight, as in Gemma) or layernorm.
        norm_order: Where a block's norms are: pre (before attention and before MLP), post (after
            each, OLMo-2) or sandwich (before and after each, Gemma).
        rms_norm_eps: Epsilon of any norm.
        mlp: swiglu (SiLU gate), geglu (tanh-GELU gate) or gelu (tanh-GELU without a gate).
        qkv_bias: Whether the q, k and v projections have a bias.
        attention_output_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the MLP's projections have a bias.
        qk_norm: Whether q and k pass an RMSNorm before RoPE (Qwen3).
        qk_norm_width: Over what that norm is: head (each head's width) or all (all heads, OLMo-2).
        query_pre_attn_scalar: Attention scores are divided by its root; null takes head_dim.
        attn_logit_softcapping: Attention scores s become c * tanh(s / c); null for none (Gemma 2).
        final_logit_softcapping: The same for the head's logits; null for none.
        scale_embeddings: Whether embeddings are multiplied by the root of hidden_size (Gemma).
        position_embedding: rope, or learned (a table of max_position_embeddings rows, GPT-2).
        sliding_window: Number of latest tokens a token attends to, itself included; null for all.
        sliding_window_pattern: Every n-th layer attends to all tokens; null for none of them.
        rope_theta: Base of the RoPE frequencies.
        rope_local_base_freq: Base of the frequencies in layers with a window, which are not scaled
            (Gemma 3); null takes those of the others.
        rope_scaling: Hugging Face's dict: rope_type linear, dynamic, yarn, llama3 or longrope, and
            the fields of that kind.
        tie_word_embeddings: Whether the head is the embedding table.
        num_experts: Experts of a block, of which each token takes some; 0 for one dense MLP.
        num_experts_per_tok: How many experts a token takes.
        moe_intermediate_size: Width of an expert's hidden layer; 0 takes intermediate_size.
        norm_topk_prob: Whether the weights of a token's experts are made to sum to 1.
        scoring_func: How router logits become weights: softmax, or sigmoid (with a bias that
            corrects the choice, DeepSeek-V3).
        n_group: The experts lie in this many groups, of which a token's best are taken first.
        topk_group: How many groups a token takes.
        routed_scaling_factor: Multiplies the weights of a token's experts.
        n_shared_experts: Experts that every token takes besides, as one MLP of their joint width.
        first_k_dense_replace: This many of the first blocks have a dense MLP in spite of experts.
        router_aux_loss_coef: Weight of the loss that balances experts, in training.
        kv_lora_rank: Width of the latent that keys and values are made of; 0 for ordinary
            attention (DeepSeek-V3's multi-head latent attention).
        q_lora_rank: Width of the latent that queries are made of; 0 for none.
        qk_nope_head_dim: Of latent attention: width of a head's part without RoPE.
        qk_rope_head_dim: Of latent attention: width of the part with RoPE, whose key all heads
            share.
        v_head_dim: Of latent attention: width of a head's values.
        initializer_range: Standard deviation of the initial weights.
        vocab_multiple: The embedding's rows are padded to a multiple of this. It does not depend
            on the mesh, so that a checkpoint fits any mesh.
        preset: Name of the preset these fields started from; `from_preset` applies one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    norm: str = "rmsnorm"
    norm_order: str = "pre"
    rms_norm_eps: float = 1e-5
    mlp: str = "swiglu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_width: str = "head"
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    scale_embeddings: bool = False
    position_embedding: str = "rope"
    sliding_window: int | None = None
    sliding_window_pattern: int | None = None
    rope_theta: float = 10000.0
    rope_local_base_freq: float | None = None
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    scoring_func: str = "softmax"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0
    router_aux_loss_coef: float = 0.001
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0
    initializer_range: float = 0.02
    vocab_multiple: int = 128
    preset: str | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            limits.whole(f"model.{name}", getattr(self, name), 1)
        model_parts.check_latent_attention(self)
        self._fill_heads()
        limits.whole("model.max_position_embeddings", self.max_position_embeddings, 1)
        limits.choice("model.norm", self.norm, NORMS)
        limits.choice("model.norm_order", self.norm_order, NORM_ORDERS)
        limits.choice("model.qk_norm_width", self.qk_norm_width, ("head", "all"))
        limits.choice("model.position_embedding", self.position_embedding, ("rope", "learned"))
        limits.number("model.rms_norm_eps", self.rms_norm_eps, above=0, below=1)
        limits.choice("model.mlp", self.mlp, MLPS)
        for name in FLAGS:
            limits.flag(f"model.{name}", getattr(self, name))
        model_parts.check_scores(self)
        model_parts.check_windows(self)
        limits.number("model.rope_theta", self.rope_theta, above=1)
        if self.rope_scaling is not None:
            scaling = rope_scaling.checked(self.rope_scaling, self.rotary_dim)
            object.__setattr__(self, "rope_scaling", scaling)
        model_parts.check_experts(self)
        limits.number("model.initializer_range", self.initializer_range, above=0)
        limits.whole("model.vocab_multiple", self.vocab_multiple, 1)

    def _fill_heads(self) -> None:
        """Give num_key_value_heads and head_dim their values, and check that they fit together."""
        heads = self.num_attention_heads
        kv_heads = self.num_key_value_heads or heads
        limits.whole("model.num_key_value_heads", kv_heads, 1)
        if heads % kv_heads:
            fitting = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
            raise UsageError(
                f"model.num_key_value_heads={kv_heads} does not divide "
                f"num_attention_heads={heads}; choose it from {fitting}"
            )
        if not self.head_dim and self.hidden_size % heads:
            raise UsageError(
                f"model.hidden_size={self.hidden_size} is not divisible by "
                f"num_attention_heads={heads}; choose other numbers or set --model.head_dim"
            )
        latent = self.qk_nope_head_dim + self.qk_rope_head_dim
        head_dim = latent or self.head_dim or self.hidden_size // heads
        limits.whole("model.head_dim", head_dim, 2)
        if head_dim % 2:
            raise UsageError(
                f"model.head_dim={head_dim} must be even, because RoPE rotates pairs; "
                f"choose {head_dim + 1}"
            )
        object.__setattr__(self, "num_key_value_heads", kv_heads)
        object.__setattr__(self, "head_dim", head_dim)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "ModelConfig":
        """The preset `name` (see `jaxdist.config.presets`) with some fields replaced."""
        return cls(**{**load_preset(name), "preset": name, **overrides})

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding: vocab_size rounded up to a multiple of vocab_multiple."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def rotary_dim(self) -> int:
        """How much of a head RoPE rotates."""
        return self.qk_rope_head_dim or self.head_dim

    @property
    def value_dim(self) -> int:
        """Width of a head's values and of its output."""
        return self.v_head_dim or self.head_dim

    @property
    def attention_scale(self) -> float:
        """What multiplies the attention scores."""
        return model_parts.attention_scale(self)

    @property
    def expert_size(self) -> int:
        """Width of an expert's hidden layer."""
        return self.moe_intermediate_size or self.intermediate_size

    def is_local(self, layer: int) -> bool:
        """Whether the layer, counted from 0, attends to the sliding window only."""
        pattern = self.sliding_window_pattern
        return self.sliding_window is not None and (pattern is None or (layer + 1) % pattern != 0)

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence, in tokens, that the positions allow.

        For linear and dynamic scaling max_position_embeddings is the length before scaling,
        for the other kinds the length after it (as in published configs).
        """
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") in ("linear", "dynamic"):
            return int(self.max_position_embeddings * scaling["factor"])
        return self.max_position_embeddings
