"""What a caller of the engine is given: vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One candidate token at one position: its log-probability and its rank, the best being 1."""

    logprob: float
    rank: int


Logprobs = dict[int, Logprob]  # by token id: the likeliest ones, and the chosen one


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One continuation so far.

    Attributes:
        index: Which of the n.
        text: All its text that is certain; while streaming a split character or what may become
            a stop text waits.
        token_ids: All its tokens.
        cumulative_logprob: Sum over its tokens, where logprobs were asked for.
        logprobs: One entry a token, where asked for.
        finish_reason: None while it goes on.
        stop_reason: The stop text or token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A request so far.

    Attributes:
        request_id: As given.
        prompt: Its text, where it was given as text.
        prompt_token_ids: Its tokens.
        prompt_logprobs: One entry a token, None for the first, where asked for.
        outputs: The n continuations, by index.
        finished: Whether all of them are.
        num_cached_tokens: Tokens of the prompt that the prefix cache held.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    outputs: Sequence[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
