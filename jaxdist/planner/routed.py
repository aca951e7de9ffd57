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
    tokens: int  # N
    hidden: int  # D, or what tp shards the sequence to
    tp: int
    bytes: int  # of a number in the compute dtype
    row_block: int

    @property
    def saved(self) -> int:
        """On top of what a block with an MLP keeps.

        On one member all that experts make is kept, and their results in fp32; on several, which
        make it again, the tokens and their choices alone.
        """
        model, choices = self.model, self.model.num_experts_per_tok
        # The router's own fp32 tokens, where those that the norm makes are narrower.
        widened = self.hidden if self.bytes < _FP32 else 0
        router = _FP32 * (widened + 2 * model.num_experts + 2 * choices + 8)
        if self.tp > 1:
            return self.tokens * (router + 2 * _FP32 * choices)
        rows = self._rows * (_FP32 + self.bytes * (self.hidden + 3 * model.expert_size))
        results = self.tokens * choices * _FP32 * (self.hidden + 2)
        # Nothing else takes the norm's own output where no MLP is beside them.
        unused = 0 if model.n_shared_experts else self.tokens * self.bytes * widened
        return self.tokens * router + rows + results - unused

    @property
    def working(self) -> int:
        """While a backward runs: weights in the compute dtype, their gradients, rows either way."""
        model = self.model
        weights = 3 * model.num_experts // self.tp * model.hidden_size * model.expert_size
        narrow = weights * self.bytes if self.bytes < _FP32 else 0
        width = 2 * model.hidden_size + 3 * model.expert_size
        ways = 1 if self.tp == 1 else 2
        rows = ways * self._rows * self.bytes * width
        results = self.tokens * model.num_experts_per_tok * _FP32 * model.hidden_size
        return weights * _FP32 + narrow + rows + ways * results

    @property
    def _rows(self) -> int:
        """P."""
        choices = self.tokens * self.model.num_experts_per_tok
        experts = self.model.num_experts // self.tp
        return (choices // self.row_block + experts) * self.row_block
