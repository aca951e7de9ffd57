"""What a step found, gathered piece by piece and put into a `RowResult` a row. Numpy only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxdist.inference.step import TokenLogprobs


@dataclass
class Found:
    """One row's share of what its launches gave."""

    token_ids: Sequence[int] = ()
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    hidden: list[np.ndarray] = field(default_factory=list)  # [tokens, E] of each piece

    def take_sampled(self, sampled: Any, place: int, top: int | None) -> None:
        """From `Sampled` of the launch, of which this is row `place`; `top` alternatives told."""
        count = int(sampled.num_tokens[place])
        self.token_ids = sampled.tokens[place, :count].tolist()
        if top is not None:
            own = [array[place] for array in sampled.logprobs]
            self.logprobs = _entries(own, count, top)

    def take_prompt(self, logprobs: Sequence[np.ndarray], count: int, top: int) -> None:
        """The next `count` positions of the prompt."""
        self.prompt_logprobs = (self.prompt_logprobs or []) + _entries(logprobs, count, top)


def _entries(logprobs: Sequence[np.ndarray], count: int, top: int) -> list[TokenLogprobs]:
    """From arrays [positions, ...] in the order of `sampler.Logprobs`."""
    chosen, rank, top_ids, top_values = logprobs
    return [
        TokenLogprobs(
            chosen=float(chosen[i]),
            rank=int(rank[i]),
            top_ids=top_ids[i, :top].tolist(),
            top_logprobs=top_values[i, :top].tolist(),
        )
        for i in range(count)
    ]
