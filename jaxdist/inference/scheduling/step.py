"""What scheduler and model runner say to each other: plain numbers, no array of a device.

A step computes, for each of its rows, some tokens of one sequence, and samples after the last of
them where `sample` says so. Steps are launched one ahead of the results: a row's token may then be
`PENDING`, the one that its slot sampled in the step before, which only the device knows yet.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxdist.inference.sampling.sampling_params import SamplingParams

PENDING = -1  # in place of a token id: what this slot sampled in the step before


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sequence's part in a step.

    Attributes:
        slot: Its place among the running sequences, the same from `start` to `stop`. Slots are
            dealt to the replicas in equal, contiguous shares.
        token_ids: The tokens to compute, at positions `position` and on.
        position: Tokens whose keys and values are in the blocks already.
        block_table: Blocks of the sequence, for all positions up to the last of `token_ids`.
        num_drafts: How many of `token_ids`, the last ones, are guesses. Sampled at each of them
            and at the token before: num_drafts + 1 positions, kept up to the first wrong guess.
        sample: Whether the token after the last one is wanted; False in a chunk of a prompt that
            is not its last.
        masks: Allowed tokens, uint32 [num_drafts + 1, ceil(vocab_size / 32)], bit i of word w for
            token 32 w + i; None allows all.
        masks_follow: Whether they depend on a token that is PENDING: `Runner.sample` brings them.
    """

    slot: int
    token_ids: Sequence[int]
    position: int
    block_table: Sequence[int]
    num_drafts: int = 0
    sample: bool = True
    masks: np.ndarray | None = None
    masks_follow: bool = False


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position, of the raw logits.

    Attributes:
        chosen: Of the token that was chosen, or, in a prompt, that comes next.
        rank: Of that token; the likeliest is 1.
        top_ids, top_logprobs: The likeliest tokens, best first, as many as asked for.
    """

    chosen: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class RowResult:
    """What came of a row.

    Attributes:
        token_ids: Sampled tokens: none where `sample` was False, else the drafts that were right
            and one more.
        logprobs: One a sampled token, where the parameters ask for them.
        prompt_logprobs: One for each of the row's token_ids that has a successor in the prompt,
            where the parameters ask for them.
        hidden: The mean-pooled or last hidden state where the sequence was started for
            embedding, after its last token.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    hidden: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class NewSequence:
    """A sequence that enters a slot.

    Attributes:
        prompt_ids: The prompt.
        output_ids: What was generated before a preemption.
        params: Its sampling; `seed` is set.
        pooling: None to generate, "mean" or "last" to embed the prompt.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int] = ()
    params: SamplingParams
    pooling: str | None = None


class Runner(Protocol):
    """The device's side of the engine. Everything it is told was checked before."""

    vocab_size: int  # ids that may be sampled: the tokenizer's, at most the model's
    hidden_size: int  # numbers of an embedding
    block_size: int  # tokens a block
    num_blocks: int  # of one replica, block 0 included, which is never allocated
    num_replicas: int  # dp: each has blocks and slots of its own
    max_num_seqs: int  # slots of all replicas
    max_model_len: int  # tokens of one sequence
    max_row_tokens: int  # tokens of one row in a step

    def start(self, slot: int, sequence: NewSequence) -> None:
        """A sequence takes a free slot; nothing is computed yet."""
        ...

    def stop(self, slot: int) -> None:
        """The slot's sequence has finished, was aborted or preempted."""
        ...

    def launch(self, rows: Sequence[Row]) -> Any:
        """Start a step, in order after those before; returns what `wait` takes. Does not block.

        Where masks of some rows follow, only `sample` starts what needs them.
        """
        ...

    def sample(self, launched: Any, masks: Mapping[int, np.ndarray | None]) -> None:
        """Bring the masks that follow, by number of the row, all at once; before `wait`."""
        ...

    def wait(self, launched: Any) -> list[RowResult]:
        """Results of a step, one a row, when they are there."""
        ...
