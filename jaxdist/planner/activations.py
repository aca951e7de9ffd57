"""What one layer saves for its backward pass, and needs while it runs, in bytes of one device.

Shapes: B rows of a microbatch, T tokens, D hidden size, F intermediate size; what tp shards is
divided by it.
"""

from dataclasses import dataclass

from jaxdist.config import ModelConfig
from jaxdist.config.compute import SAVED_ACTIVATIONS
from jaxdist.planner.attended import FP32, Attended, kept_by_norm, normed_again
from jaxdist.planner.routed import Routed

_DOTS = tuple(name for name in SAVED_ACTIVATIONS if name.endswith("_proj"))
_SCORED_TOKENS = 512  # whose logits are held at once (ops/cross_entropy.py)
_SCORE_BLOCK = 128  # tokens whose attention scores are held at once (ops/blocked_attention.py)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One block on one tp member; `routed` are its experts, where it has any."""

    model: ModelConfig
    rows: int  # B
    length: int  # T
    tp: int
    sequence_parallel: bool
    bytes: int  # of a number in the compute dtype
    operand: int | None = None  # of a product's, where it has not `bytes` of them
    stored: int | None = None  # of one that waits between loops, likewise
    row_block: int = 1  # rows of an expert are padded to a multiple of it

    @property
    def attention(self) -> Attended:
        """The block's attention."""
        return Attended(
            model=self.model,
            tokens=self._tokens,
            hidden=self._hidden,
            tp=self.tp,
            bytes=self.bytes,
        )

    @property
    def routed(self) -> Routed | None:
        """The experts of which a token takes some."""
        if not self.model.num_experts:
            return None
        return Routed(
            model=self.model,
            rows=self.rows,
            tokens=self._tokens,
            hidden=self._hidden,
            tp=self.tp,
            bytes=self.bytes,
            row_block=self.row_block,
            stored=self.stored,
        )

    @property
    def stream(self) -> int:
        """The residual stream [B, T, D], which goes from stage to stage."""
        return self._tokens * self._hidden * self.bytes

    def saved(self, remat: str) -> int:
        """What a forward leaves in the rings."""
        if remat == "none":
            return self._all_saved()
        return self.stream + sum(self._named(name) for name in self._kept(remat))

    def largest_saved(self, remat: str) -> list[int]:
        """Bytes of each of the arrays that a forward leaves there, the largest first."""
        if remat == "none":
            attention = self.attention
            wide = [FP32 * width for width in 4 * [self._hidden] + 2 * attention.latents]
            narrow = [attention.queries, attention.keys, attention.values, attention.outs]
            narrow += [attention.outs, self._hidden, self._hidden, *self._mlp]
            sizes = [self._tokens * n for n in wide + [self.bytes * n for n in narrow]]
            return sorted(sizes + ([] if self.routed is None else self.routed.largest))[::-1]
        named = [self._named(name) for name in self._kept(remat)]
        return sorted([self.stream, *named])[::-1]

    def taps(self, remat: str) -> int:
        """What a backward leaves for weight gradients that are made later.

        The cotangents of all products' outputs; and of the products' inputs those that are neither
        in the rings nor made again.
        """
        mlp = self._hidden + self._expanded if self._has_mlp else 0
        waiting = self._tokens * self.bytes * (self.attention.made + mlp)
        waiting += 0 if self.routed is None else self.routed.taps
        return waiting + self.made_again(remat)

    def made_again(self, remat: str) -> int:
        """Of these, the inputs of products that a backward makes again."""
        if remat == "none":
            return 0
        kept, routed = self._kept(remat), self.routed
        # The router's scores are made again whatever is kept.
        known = self._knows_expanded(kept) and routed is None
        made = self.attention.made_again(kept) + self._tokens * self.bytes * self._inner_again(kept)
        made += normed_again(self._tokens, self._hidden, self.bytes, known)
        return made + (0 if routed is None else routed.made_again)

    def _knows_expanded(self, kept: set[str]) -> bool:
        return "up_proj" in kept and ("gate_proj" in kept or not self._gated)

    def _inner_again(self, kept: set[str]) -> int:
        """Width of what the product out of the MLP takes, or of what that is made of."""
        if "mlp_hidden" in kept and self._keeps_inner:
            return 0
        if self._ends_with_norm and "down_proj" not in kept:
            return self._inner  # that product runs again
        return 0 if self._knows_expanded(kept) else self._expanded

    def working(self, remat: str) -> int:
        """While a layer's backward runs: all that was saved or is made again, and cotangents.

        The factors are fitted to what XLA allots, and held to it by the tests.
        """
        block = min(self.length, _SCORE_BLOCK)
        scores = self.rows * self.attention.heads * self.length * block * FP32
        expanded = self._tokens * 2 * self._inner * self.bytes
        again = self._working_again if remat == "full" else 0
        routed = 0 if self.routed is None else self.routed.working(remat)
        return self._all_saved() + expanded + 5 * scores // 4 + again + routed

    @property
    def _working_again(self) -> int:
        """What a layer that is made again has on top: seven arrays as wide as the MLP in all.

        Five of them are operands of products, in whatever dtype those take.
        """
        more = 2 * self.bytes
        if self.operand is not None:
            more -= 5 * (self.bytes - self.operand)
        return self._tokens * self._inner * more + 2 * self.stream

    def scoring(self, vocabulary_rows: int) -> int:
        """While a microbatch is scored: logits of a chunk of tokens, twice, and three streams."""
        chunk = min(self.rows * self.length, _SCORED_TOKENS)
        return 2 * chunk * vocabulary_rows * FP32 + 3 * self.stream

    @staticmethod
    def _kept(remat: str) -> set[str]:
        names = [] if remat == "full" else [name.strip() for name in remat.split(",")]
        return {part for name in names for part in (_DOTS if name == "dots" else (name,))}

    def _all_saved(self) -> int:
        """What norms keep, and the inputs of products and of activations."""
        norms = 4 if self.model.norm_order == "sandwich" else 2
        saved = norms * kept_by_norm(self.model, self._tokens, self._hidden) + self.attention.saved
        saved += self._tokens * self.bytes * (2 * self._hidden + sum(self._mlp))
        return saved if self.routed is None else saved + self.routed.saved

    def _named(self, name: str) -> int:
        """What `checkpoint_name` marks so in the model, if the backward has a use for it."""
        widths = {
            "gate_proj": self._inner if self._gated else 0,
            "up_proj": self._inner,
            "down_proj": self._hidden if self._ends_with_norm and self._keeps_inner else 0,
            "mlp_hidden": self._inner if self._keeps_inner else 0,
        }
        if name in widths:
            return self._tokens * self.bytes * widths[name]
        return self.attention.named(name)

    @property
    def _tokens(self) -> int:
        return self.rows * self.length

    @property
    def _hidden(self) -> int:
        return self.model.hidden_size // (self.tp if self.sequence_parallel else 1)

    @property
    def _gated(self) -> bool:
        return self.model.mlp != "gelu"

    @property
    def _inner(self) -> int:
        """Width of the MLP; beside experts, that of the one which every token takes, or none."""
        model = self.model
        if model.num_experts:
            return model.n_shared_experts * model.expert_size // self.tp
        return model.intermediate_size // self.tp

    @property
    def _has_mlp(self) -> bool:
        return not self.model.num_experts or self.model.n_shared_experts > 0

    @property
    def _ends_with_norm(self) -> bool:
        return self.model.norm_order != "pre" and self._has_mlp

    @property
    def _keeps_inner(self) -> bool:
        """Whether the MLP's hidden layer is kept and has a name: beside experts over tp it is made
        again with theirs (`parallel/experts.py`)."""
        return self.tp == 1 or not self.model.num_experts

    @property
    def _mlp(self) -> list[int]:
        """Widths of what the MLP keeps."""
        return [self._inner] * (1 + self._gated + self._keeps_inner)

    @property
    def _expanded(self) -> int:
        """Outputs of the products into the MLP's hidden layer."""
        return (1 + self._gated) * self._inner
