"""What a block's attention saves for its backward pass, in numbers and bytes of one device.

Shapes: N tokens of a microbatch, D hidden size, H head dim, V width of a head's values, C width of
a latent. Latent attention has heads of its own widths, and two narrow latents that are normed
(`models/latent_attention.py`).
"""

from dataclasses import dataclass, replace

from jaxdist.config import ModelConfig

FP32 = 4


def kept_by_norm(model: ModelConfig, tokens: int, width: int, heads: int = 1) -> int:
    """Bytes that a norm over the width of a head keeps, without its result.

    Two fp32 arrays, two numbers a token and head, the gain in fp32 and a number (two of a layer
    norm).
    """
    gain = width // heads + (2 if model.norm == "layernorm" else 1)
    return FP32 * (tokens * (2 * width + 2 * heads) + gain)


def normed_again(tokens: int, width: int, bytes_out: int, product_known: bool) -> int:
    """Bytes of a norm's result, made again, that waits for the weight gradient of its product.

    Where the product need not run again, it is left in fp32 before its gain, and the gain.
    """
    return FP32 * width * (tokens + 1) if product_known else tokens * bytes_out * width


@dataclass(frozen=True, kw_only=True)
class Attended:
    """The attention of one tp member; widths are numbers a token."""

    model: ModelConfig
    tokens: int  # N
    hidden: int  # D, or what tp shards the sequence to
    tp: int
    bytes: int  # of a number in the compute dtype

    @property
    def saved(self) -> int:
        """Without the norm before it, whose result its products keep.

        Queries, keys and values; the result as the attention's own backward takes it and as the
        output projection does, and a statistic a head; norms of heads, or of latents and what
        products make of them.
        """
        heads = self.queries + self.keys + self.values + 2 * self.outs
        saved = self.tokens * (self.bytes * (heads + sum(self.latents)) + FP32 * self.heads)
        norms = [(rank, 1) for rank in self.latents]
        if self.model.qk_norm:
            alone = self.model.qk_norm_width == "all"
            norms = [
                (width, 1 if alone else width // self.model.head_dim)
                for width in (self.queries, self.keys)
            ]
        kind = replace(self.model, norm="rmsnorm")
        return saved + sum(kept_by_norm(kind, self.tokens, *norm) for norm in norms)

    def named(self, name: str) -> int:
        """Bytes of what `checkpoint_name` marks so in the model."""
        sizes = {
            "q_proj": self.queries,
            "k_proj": self.keys,
            "v_proj": self.values,
            "o_proj": self.hidden,
            "qkv": self.queries + self.keys + self.values,
            "attn_out": self.outs,
        }
        if self.model.kv_lora_rank:  # keys and values come out of one product
            sizes |= {"k_proj": self._joint, "v_proj": 0}
        statistics = FP32 * self.heads if name == "attn_out" else 0
        return self.tokens * (self.bytes * sizes[name] + statistics)

    @property
    def made(self) -> int:
        """Outputs of all products."""
        if not self.model.kv_lora_rank:
            return self.queries + self.keys + self.values + self.hidden
        down = sum(self.latents) + self.model.qk_rope_head_dim
        return self.queries + self._joint + down + self.hidden

    def made_again(self, kept: set[str]) -> int:
        """Bytes of its products' inputs that a backward makes again where `kept` is saved."""
        outs = 0 if {"attn_out", "o_proj"} <= kept else self.tokens * self.bytes * self.outs
        known = [self._known(kept, name) for name in ("q_proj", "k_proj", "v_proj")]
        # Without a norm before it, it takes what enters the block, which is always kept.
        into = 0
        if self.model.norm_order != "post":
            # What latents are made of runs again in any case, for their norms are to be undone.
            into = self._normed_again(self.hidden, all(known) and not self.latents)
        ranks = zip(self.latents, known[:2][-len(self.latents) :], strict=False)
        return outs + into + sum(self._normed_again(*latent) for latent in ranks)

    def _known(self, kept: set[str], name: str) -> bool:
        """Whether nothing that is made again needs this product."""
        if not self.model.qk_norm or name == "v_proj":
            return name in kept or "qkv" in kept
        # To undo the norm takes what was normed: by its name a head's, not that over all heads.
        return name in kept and self.model.qk_norm_width == "head"

    def _normed_again(self, width: int, known: bool) -> int:
        return normed_again(self.tokens, width, self.bytes, known)

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.model.num_attention_heads // self.tp

    @property
    def queries(self) -> int:
        """Of all heads."""
        return self.heads * self.model.head_dim

    @property
    def keys(self) -> int:
        """Keys, which each member has of its own query heads where tp does not divide them."""
        heads = self.model.num_key_value_heads
        return self.queries if heads % self.tp else heads * self.model.head_dim // self.tp

    @property
    def values(self) -> int:
        """Values, of as many heads as there are keys."""
        return self.keys * self.model.value_dim // self.model.head_dim

    @property
    def outs(self) -> int:
        """The result, before the output projection."""
        return self.heads * self.model.value_dim

    @property
    def latents(self) -> list[int]:
        """Widths of the latents of queries, where there is one, and of keys and values."""
        return [rank for rank in (self.model.q_lora_rank, self.model.kv_lora_rank) if rank]

    @property
    def _joint(self) -> int:
        """Of latent attention: keys without the part that heads share, beside the values."""
        return self.heads * (self.model.qk_nope_head_dim + self.model.v_head_dim)
