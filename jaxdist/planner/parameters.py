"""How many numbers one device holds of a model, from its config alone.

Shapes: D hidden size, N query heads, K key/value heads, H head dim, F intermediate size.
"""

from dataclasses import dataclass

from jaxdist.config import MeshShape, ModelConfig


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of one (pp, tp) member; dp divides `shard` of them where ZeRO shards."""

    layer: int  # of one layer
    rows: int  # layers that the member's stack has room for
    tables: int  # embedding, and the head where it is another table
    rest: int  # final norm, learned positions

    @classmethod
    def of(cls, model: ModelConfig, mesh: MeshShape, rows: int) -> "Counts":
        """The member of `mesh` whose stack has `rows` rows."""
        tables = 1 if model.tie_word_embeddings else 2
        table = model.padded_vocab_size * model.hidden_size // (mesh.pp * mesh.tp)
        positions = model.max_position_embeddings * (model.position_embedding == "learned")
        return cls(
            layer=layer_parameters(model, mesh.tp),
            rows=rows,
            tables=tables * table,
            rest=model.hidden_size * (_norm_width(model) + positions),
        )

    @property
    def total(self) -> int:
        """All of them."""
        return self.rows * self.layer + self.tables + self.rest

    def shard(self, dp: int) -> int:
        """One dp member's part, where all is sharded."""
        return -(-self.total // dp)

    def in_passing(self, zero: int, dp: int, compute_bytes: int, reduce_bytes: int) -> int:
        """Bytes of layers made whole (ZeRO-3), and of one's gradients before they are (ZeRO-2).

        A layer is whole while it works, the next one is gathered meanwhile, and a third is the
        gather's result before it is laid out.
        """
        whole = 3 * self.layer * compute_bytes if zero >= 3 and dp > 1 else 0
        return whole + (self.layer * reduce_bytes if zero >= 2 else 0)


def layer_parameters(model: ModelConfig, tp: int = 1) -> int:
    """Numbers of one block that a tp member holds; of a block with experts where there are any."""
    hidden = model.hidden_size
    norms = {"pre": 2, "post": 2, "sandwich": 4}[model.norm_order] * hidden * _norm_width(model)
    attention = _latent_attention(model, tp) if model.kv_lora_rank else _attention(model, tp)
    if not model.num_experts:
        return norms + attention + _mlp(model, model.intermediate_size, tp)
    width = model.moe_intermediate_size or model.intermediate_size
    experts = model.num_experts * 3 * hidden * width // tp
    router = hidden * model.num_experts + model.num_experts * (model.scoring_func == "sigmoid")
    shared = _mlp(model, width * model.n_shared_experts, tp) if model.n_shared_experts else 0
    return norms + attention + experts + router + shared


def _attention(model: ModelConfig, tp: int) -> int:
    hidden, head = model.hidden_size, model.head_dim
    queries = model.num_attention_heads * head // tp
    kv = 2 * model.num_key_value_heads * head
    kv = kv // tp if model.num_key_value_heads % tp == 0 else kv
    biases = model.qkv_bias * (queries + kv) + model.attention_output_bias * hidden
    norms = 0
    if model.qk_norm:
        norms = 2 * head if model.qk_norm_width == "head" else queries + kv // 2
    return hidden * (2 * queries + kv) + biases + norms


def _latent_attention(model: ModelConfig, tp: int) -> int:
    hidden, heads = model.hidden_size, model.num_attention_heads
    q_rank, kv_rank = model.q_lora_rank, model.kv_lora_rank
    queries = heads * model.head_dim // tp
    up = heads * (model.qk_nope_head_dim + model.v_head_dim) // tp
    q = hidden * q_rank + q_rank + q_rank * queries if q_rank else hidden * queries
    kv = hidden * (kv_rank + model.qk_rope_head_dim) + kv_rank + kv_rank * up
    return q + kv + heads * model.v_head_dim // tp * hidden


def _mlp(model: ModelConfig, width: int, tp: int) -> int:
    gated, hidden = model.mlp != "gelu", model.hidden_size
    biases = model.mlp_bias * ((1 + gated) * width // tp + hidden)
    return (2 + gated) * hidden * width // tp + biases


def _norm_width(model: ModelConfig) -> int:
    """Vectors of a norm: a layernorm has a bias too."""
    return 2 if model.norm == "layernorm" else 1
