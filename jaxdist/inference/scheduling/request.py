"""One continuation of one prompt, as the scheduler sees it, and what is refused at the door."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import index
from typing import Any

from jaxdist.inference.errors import RequestError
from jaxdist.inference.guidance.guide import Guide
from jaxdist.inference.sampling.sampling_params import SamplingParams


class Status(Enum):
    """Where a request stands. A preempted one waits again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(kw_only=True, eq=False, slots=True)
class Request:
    """State of one sequence. The scheduler alone writes what is below `status`.

    Attributes:
        request_id: Of the caller; the n continuations of a prompt share it.
        index: Which of the n.
        params: Its sampling; `seed` is set, `n` and `max_tokens` are not looked at.
        max_tokens: Most tokens to generate, within the context.
        order: (priority, arrival): the least is served first and preempted last.
        salt: Only requests of the same salt share blocks.
        pooling: None to generate; "mean" or "last" to embed the prompt.
        run_ahead: Whether the next row can be computed before the host knows the last token.
        reuse: Whether the prompt's tokens may come from the prefix cache: not where each of them
            is asked for its log-probability or its part in a mean.
        guide: Guesses and masks for its next tokens; None where nothing is to be said.
        leader: The first of the n, whose prompt the others wait for.
        tokens: Prompt and output as far as known.
        num_computed_tokens: Tokens whose keys and values are in the blocks once all launched steps
            have run.
        num_pending: Sampled tokens that are not known yet.
        num_in_flight: Launched steps that hold a row of it and have not been waited for.
        num_cached_tokens: Tokens of the prompt that the prefix cache held at the first admission;
            -1 before it.
        num_inserted_blocks: Blocks from the first on that are this request's way in the prefix
            tree, ending in `node`; -1 once another request's equal block stands in its way.
    """

    request_id: str
    index: int = 0
    prompt_ids: Sequence[int]
    params: SamplingParams
    max_tokens: int
    order: tuple[int, int]
    salt: Hashable = None
    pooling: str | None = None
    run_ahead: bool = True
    reuse: bool = True
    guide: Guide | None = None
    leader: "Request | None" = None
    tokens: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    status: Status = Status.WAITING
    replica: int = -1
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    num_inserted_blocks: int = 0
    node: Any = None

    def __post_init__(self):
        self.tokens = list(self.prompt_ids)
        self.num_prompt_tokens = len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far that are known."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def has_prompt(self) -> bool:
        """Whether the keys and values of the whole prompt are known to be computed."""
        return self.status is Status.FINISHED or len(self.tokens) > self.num_prompt_tokens


def whole_ids(prompt: Sequence[int]) -> list[int]:
    """The prompt's ids as ints; RequestError where one is not a whole number."""
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise RequestError(
            "the prompt's token ids must be whole numbers (int)", param="prompt"
        ) from None


def resolve_max_tokens(
    prompt_ids: Sequence[int],
    max_tokens: int | None,
    *,
    vocab_size: int,
    max_model_len: int,
    capacity: int,
    default: int | None = None,
    embeds: bool = False,
) -> int:
    """The most tokens that may follow the prompt; 0 where it is only embedded.

    vocab_size: of the model, for the prompt's ids. max_model_len: tokens of prompt and output.
    capacity: tokens that the blocks of one replica hold. default: where max_tokens is None, as far
    as there is room; None takes all of it. Raises RequestError, which names the
    numbers and the fix, where the prompt or the whole can never be served.
    """
    length = len(prompt_ids)
    if not length:
        raise RequestError("the prompt has no tokens; give at least one", param="prompt")
    lowest, highest = min(prompt_ids), max(prompt_ids)
    if lowest < 0 or highest >= vocab_size:
        raise RequestError(
            f"the prompt's token ids reach from {lowest} to {highest}; the model's vocabulary has "
            f"0 to {vocab_size - 1}",
            param="prompt",
        )
    limit = min(max_model_len, capacity)
    reason = (
        f"the model's maximum context length is {max_model_len} tokens"
        if max_model_len <= capacity
        else f"the engine's blocks hold {capacity} tokens"
    )
    code = "context_length_exceeded"
    longest = limit if embeds else limit - 1
    if length > longest:
        raise RequestError(
            f"{reason}, and the prompt has {length}; shorten it to at most {longest}",
            param="prompt",
            code=code,
        )
    if embeds:
        return 0
    if max_tokens is None:
        return limit - length if default is None else min(default, limit - length)
    if length + max_tokens > limit:
        raise RequestError(
            f"{reason}, and the request asks for {length + max_tokens} ({length} of the prompt, "
            f"max_tokens={max_tokens}); set max_tokens to at most {limit - length}, or shorten "
            "the prompt",
            param="max_tokens",
            code=code,
        )
    return max_tokens
