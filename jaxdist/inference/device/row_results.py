"""Steps on their way, and what they found, gathered piece by piece into a `RowResult` a row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxdist.inference.device.launches import Launch, Piece
from jaxdist.inference.sampling.sampler import Logprobs, Sampled
from jaxdist.inference.scheduling.step import NewSequence, Row, RowResult, TokenLogprobs


@dataclass(kw_only=True)
class Running:
    """A launch and its results on the device, by number of the piece where only some have them.

    waiting: Starts its sampling with the masks, which are not known yet.
    """

    launch: Launch
    sampled: Sampled | None = None
    waiting: Callable[[np.ndarray | None], Sampled] | None = None
    prompt_logprobs: dict[int, Logprobs] = field(default_factory=dict)
    hidden: dict[int, Array] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A step on its way."""

    rows: Sequence[Row]
    sequences: Sequence[NewSequence]  # of the rows
    running: Sequence[Running]

    def results(self, sums: dict[int, np.ndarray]) -> list[RowResult]:
        """One a row, once they are there. sums: hidden states of prompts so far, by slot."""
        found = [Found() for _ in self.rows]
        for running in self.running:
            assert running.waiting is None, "its masks did not come"
            sampled, prompts, hidden = jax.device_get(
                (running.sampled, running.prompt_logprobs, running.hidden)
            )
            for index, piece in enumerate(running.launch.pieces):
                params, own = self.sequences[piece.row].params, found[piece.row]
                if piece.samples:
                    place = running.launch.places[index]
                    place = running.launch.place_among(place, len(sampled.num_tokens))
                    own.take_sampled(sampled, place, params.logprobs)
                if index in prompts:
                    top = params.prompt_logprobs or 0
                    own.take_prompt(prompts[index], self._num_scored(piece), top)
                if index in hidden:
                    own.hidden.append(hidden[index][: piece.count])
        return [
            RowResult(
                token_ids=own.token_ids,
                logprobs=own.logprobs,
                prompt_logprobs=own.prompt_logprobs,
                hidden=_pooled(own, row, sequence, sums),
            )
            for own, row, sequence in zip(found, self.rows, self.sequences, strict=True)
        ]

    def _num_scored(self, piece: Piece) -> int:
        """Tokens of a piece that have a successor in the prompt."""
        prompt = self.sequences[piece.row].prompt_ids
        first = self.rows[piece.row].position + piece.first
        return max(0, min(piece.count, len(prompt) - 1 - first))


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


def _pooled(
    found: Found, row: Row, sequence: NewSequence, sums: dict[int, np.ndarray]
) -> np.ndarray | None:
    """The sequence's embedding once its prompt is complete; chunks are summed till then."""
    if sequence.pooling is None:
        return None
    states = np.concatenate(found.hidden)
    total = sums.pop(row.slot, 0.0) + states.sum(axis=0, dtype=np.float64)
    if row.position + len(row.token_ids) < len(sequence.prompt_ids):
        sums[row.slot] = total
        return None
    if sequence.pooling == "last":
        return states[-1]
    return (total / len(sequence.prompt_ids)).astype(np.float32)


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
