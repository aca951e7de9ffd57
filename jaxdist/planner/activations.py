"""What one layer saves for its backward pass, and needs while it runs, in bytes of one device.

Shapes: B rows of a microbatch, T tokens, D hidden size, N query heads, K key/value heads, H head
dim, F intermediate size; what tp shards is divided by it.
"""

from dataclasses import dataclass

from jaxdist.config import ModelConfig
from jaxdist.config.compute import SAVED_ACTIVATIONS
from jaxdist.planner.routed import Routed

_FP32 = 4
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
    row_block: int = 1  # rows of an expert are padded to a multiple of it

    @property
    def routed(self) -> Routed | None:
        """The experts of which a token takes some."""
        if not self.model.num_experts:
            return None
        return Routed(
            model=self.model,
            tokens=self._tokens,
            hidden=self._hidden,
            tp=self.tp,
            bytes=self.bytes,
            row_block=self.row_block,
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
            wide = [_FP32 * self._hidden] * 2
            narrow = [self._queries] * 3 + [self._keys] * 2 + [self._hidden] * 2
            narrow += [self._inner] * (2 + self._gated)
            return sorted(self._tokens * n for n in wide + [self.bytes * n for n in narrow])[::-1]
        named = [self._named(name) for name in self._kept(remat)]
        return sorted([self.stream, *named])[::-1]

    def taps(self, remat: str) -> int:
        """What a backward leaves for weight gradients that are made later.

        The cotangents of all products' outputs; and of the products' inputs those that are neither
        in the rings nor made again.
        """
        cotangents = self._queries + 2 * self._keys + 2 * self._hidden + self._expanded
        return self._tokens * self.bytes * cotangents + self.made_again(remat)

    def made_again(self, remat: str) -> int:
        """Of these, the inputs of products that a backward makes again."""
        if remat == "none":
            return 0
        if "dots" in remat:
            return self._tokens * (self.bytes * self._queries + 2 * _FP32 * self._hidden)
        return self._tokens * self.bytes * (self._queries + self._expanded + 2 * self._hidden)

    def working(self, remat: str) -> int:
        """While a layer's backward runs: all that was saved or is made again, and cotangents.

        The factors are fitted to what XLA allots, and held to it by the tests.
        """
        scores = self.rows * self._heads * self.length * min(self.length, _SCORE_BLOCK) * _FP32
        again = 6 * self.stream if remat == "full" else 0
        expanded = self._tokens * 2 * self._inner * self.bytes
        routed = 0 if self.routed is None else self.routed.working
        return self._all_saved() + expanded + 5 * scores // 4 + again + routed

    def scoring(self, vocabulary_rows: int) -> int:
        """While a microbatch is scored: logits of a chunk of tokens, twice, and three streams."""
        chunk = min(self.rows * self.length, _SCORED_TOKENS)
        return 2 * chunk * vocabulary_rows * _FP32 + 3 * self.stream

    @staticmethod
    def _kept(remat: str) -> set[str]:
        names = [] if remat == "full" else [name.strip() for name in remat.split(",")]
        return {part for name in names for part in (_DOTS if name == "dots" else (name,))}

    def _all_saved(self) -> int:
        """Each norm keeps two fp32 arrays and two numbers a token; products keep their inputs."""
        per_token = 2 * (_FP32 * (2 * self._hidden + 2) + self.bytes * self._hidden)
        per_token += self.bytes * (3 * self._queries + 2 * self._keys) + _FP32 * self._heads
        per_token += self.bytes * (self._expanded + self._inner)
        saved = self._tokens * per_token + 2 * _FP32 * (self.model.hidden_size + 1)
        return saved if self.routed is None else saved + self.routed.saved

    def _named(self, name: str) -> int:
        """What `checkpoint_name` marks so in the model; o_proj and down_proj end the block."""
        sizes = {
            "q_proj": self._queries,
            "k_proj": self._keys,
            "v_proj": self._keys,
            "o_proj": self._hidden,
            "gate_proj": self._inner if self._gated else 0,
            "up_proj": self._inner,
            "down_proj": 0,
            "qkv": self._queries + 2 * self._keys,
            "attn_out": self._queries,
            "mlp_hidden": self._inner,
        }
        statistics = _FP32 * self._heads if name == "attn_out" else 0
        return self._tokens * (self.bytes * sizes[name] + statistics)

    @property
    def _tokens(self) -> int:
        return self.rows * self.length

    @property
    def _hidden(self) -> int:
        return self.model.hidden_size // (self.tp if self.sequence_parallel else 1)

    @property
    def _heads(self) -> int:
        return self.model.num_attention_heads // self.tp

    @property
    def _queries(self) -> int:
        return self._heads * self.model.head_dim

    @property
    def _keys(self) -> int:
        """Keys, which each member has of its own query heads where tp does not divide them."""
        heads = self.model.num_key_value_heads
        return self._queries if heads % self.tp else heads * self.model.head_dim // self.tp

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
    def _expanded(self) -> int:
        """Outputs of the products into the MLP's hidden layer."""
        return (1 + self._gated) * self._inner
