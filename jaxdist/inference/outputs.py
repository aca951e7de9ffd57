"""What a caller of the engine is given: vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True)
class Logprob:
    """One candidate token at one position: its log-probability and its rank, the best being 1.

    `LLM` tells its text too; between engine and server ids do.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


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


@dataclass(kw_only=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None: not yet.

    It is one object for the life of a request, so it goes on changing while the request runs.

    Attributes:
        arrival_time: It was given to the engine.
        first_scheduled_time: Its first step was launched; until then it was queued.
        first_token_time: The first token of any of its continuations was known.
        last_token_time: The newest token was known.
        finished_time: It ended.
        num_preemptions: How often it lost its blocks and was computed again.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


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
        embedding: The pooled hidden state, float32 [hidden_size], where it was asked for.
        metrics: When things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    prompt_logprobs: Sequence[Logprobs | None] | None = None
    outputs: Sequence[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    embedding: np.ndarray | None = None
    metrics: RequestMetrics | None = None
