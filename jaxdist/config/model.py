"""The shape of a decoder-only transformer, in Hugging Face's names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxdist.config import limits, rope_scaling
from jaxdist.config.errors import UsageError
from jaxdist.config.presets import load_preset

NORMS = ("rmsnorm", "layernorm")
MLPS = ("swiglu", "geglu", "gelu")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder: embedding, blocks of attention and MLP with pre-norm, final norm, head.

    Attributes:
        vocab_size: Number of tokens; ids reach from 0 to vocab_size - 1.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the MLP's hidden layer.
        num_hidden_layers: Number of blocks.
        num_attention_heads: Number of query heads.
        num_key_value_heads: Number of key/value heads; 0 takes num_attention_heads.
        head_dim: Width of one head; 0 takes hidden_size / num_attention_heads.
        max_position_embeddings: Longest sequence, in tokens, that the positions are made for.
        norm: rmsnorm or layernorm.
        rms_norm_eps: Epsilon of either norm.
        mlp: swiglu (SiLU gate), geglu (tanh-GELU gate) or gelu (tanh-GELU without a gate).
        qkv_bias: Whether the q, k and v projections have a bias.
        attention_output_bias: Whether the attention's output projection has a bias.
        mlp_bias: Whether the MLP's projections have a bias.
        qk_norm: Whether q and k pass an RMSNorm over head_dim before RoPE (Qwen3).
        sliding_window: Number of latest tokens a token attends to, itself included; null for all.
        rope_theta: Base of the RoPE frequencies.
        rope_scaling: Hugging Face's dict: rope_type linear, dynamic, yarn, llama3 or longrope, and
            the fields of that kind.
        tie_word_embeddings: Whether the head is the embedding table.
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
    rms_norm_eps: float = 1e-5
    mlp: str = "swiglu"
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    tie_word_embeddings: bool = False
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
        self._fill_heads()
        limits.whole("model.max_position_embeddings", self.max_position_embeddings, 1)
        limits.choice("model.norm", self.norm, NORMS)
        limits.number("model.rms_norm_eps", self.rms_norm_eps, above=0, below=1)
        limits.choice("model.mlp", self.mlp, MLPS)
        for name in (
            "qkv_bias",
            "attention_output_bias",
            "mlp_bias",
            "qk_norm",
            "tie_word_embeddings",
        ):
            limits.flag(f"model.{name}", getattr(self, name))
        if self.sliding_window is not None:
            limits.whole("model.sliding_window", self.sliding_window, 1)
        limits.number("model.rope_theta", self.rope_theta, above=1)
        if self.rope_scaling is not None:
            scaling = rope_scaling.checked(self.rope_scaling, self.head_dim)
            object.__setattr__(self, "rope_scaling", scaling)
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
        head_dim = self.head_dim or self.hidden_size // heads
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
    def max_sequence_length(self) -> int:
        """Longest sequence, in tokens, that the positions allow.

        For linear and dynamic scaling max_position_embeddings is the length before scaling,
        for the other kinds the length after it (as in published configs).
        """
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type") in ("linear", "dynamic"):
            return int(self.max_position_embeddings * scaling["factor"])
        return self.max_position_embeddings
