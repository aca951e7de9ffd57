"""What a block's experts save for its backward pass, and need while it runs; bytes of one device.

Shapes: N tokens of a microbatch, D hidden size, E experts, F features of one, K experts a token
takes, P rows of all experts: N K, and up to a block of padding an expert.
"""

from dataclasses import dataclass

from jaxdist.config import ModelConfig

_FP32 = 4


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The experts of one tp member, and the router, which each member has whole."""

    model: ModelConfig
    rows: int  # of a microbatch
    tokens: int  # N
    hidden: int  # D, or what tp shards the sequence to
    tp: int
    bytes: int  # of a number in the compute dtype
    row_block: int
    stored: int | None = None  # of one that waits between loops, where it has not `bytes` of them

    @property
    def saved(self) -> int:
        """On top of what a block with an MLP keeps.

        On one member all that experts make is kept; on several, which make it again, the tokens'
        choices alone.
        """
        choices = self.tokens * self.model.num_experts_per_tok
        if self.tp > 1:
            return self._router + 2 * _FP32 * choices
        rows = self._rows * (_FP32 + self.bytes * (self.hidden + 3 * self.model.expert_size))
        results = choices * (2 * _FP32 + self.bytes * self.hidden)
        return self._router + rows + results + _FP32 * self.model.num_experts

    @property
    def _router(self) -> int:
        """Of choosing and of the balancing loss: scores, the choice, sums; tokens' and rows'."""
        model = self.model
        experts, choices = model.num_experts, model.num_experts_per_tok
        softmax = model.scoring_func == "softmax"
        chosen = choices + (choices + 2 if model.norm_topk_prob else 0)
        scored = 2 * (experts + 2) if softmax else 3 * experts + 2
        per_token = chosen + scored + 1
        return _FP32 * (self.tokens * per_token + self.rows * (experts + 1) + 3)

    @property
    def largest(self) -> list[int]:
        """Bytes of the arrays among them that are as large as any."""
        if self.tp > 1:
            return []
        results = self.tokens * self.model.num_experts_per_tok * self.hidden
        widths = [self.hidden] + 3 * [self.model.expert_size]
        return [self.bytes * n for n in [results, *(self._rows * width for width in widths)]]

    @property
    def taps(self) -> int:
        """What weight gradients that are made later wait with.

        The router's; and those of experts where they wait, on TPUs. A loop over blocks and a region
        of several members give them with the rows' cotangents.
        """
        router = _FP32 * self.tokens * self.model.num_experts
        rows = self._rows * self.bytes * (self.hidden + 2 * self.model.expert_size)
        return router + (rows if self._waits else 0)

    @property
    def made_again(self) -> int:
        """What else they wait with where the rows and hidden layers are made again."""
        if not self._waits:
            return 0
        rows = self._rows * self.bytes * (self.hidden + self.model.expert_size)
        return rows + _FP32 * self.model.num_experts

    @property
    def _waits(self) -> bool:
        return self.tp == 1 and self.row_block == 1

    def working(self, remat: str) -> int:
        """While a backward runs: weights in the compute dtype, their gradients, rows either way."""
        model = self.model
        weights = 3 * model.num_experts // self.tp * model.hidden_size * model.expert_size
        narrow = weights * self.bytes if self.bytes < _FP32 else 0
        width = 2 * model.hidden_size + 3 * model.expert_size
        ways = 1 if self.tp == 1 else 2
        held = ways * self.bytes
        if ways == 2 and self.stored is not None:
            held = self.bytes + self.stored
        rows = self._rows * held * width
        if remat == "full" and self.tp == 1:
            rows += self._rows * self.bytes * model.hidden_size
        results = self.tokens * model.num_experts_per_tok * _FP32 * model.hidden_size
        return weights * _FP32 + narrow + rows + ways * results

    @property
    def _rows(self) -> int:
        """P."""
        choices = self.tokens * self.model.num_experts_per_tok
        experts = self.model.num_experts // self.tp
        return (choices // self.row_block + experts) * self.row_block
