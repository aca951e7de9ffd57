"""What is served: an engine with its tokenizer and chat template, and its state."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.async_engine import AsyncEngine
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.server.chat import Chat
from jaxdist.server.errors import APIError
from jaxdist.server.limits import Limits
from jaxdist.server.protocol import CompletionRequest, TokenizeRequest
from jaxdist.server.token_text import TokenText


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How the server behaves, whatever model it serves.

    Attributes:
        names: The model's; the first one is told in answers.
        api_keys: Any of these is asked for; none: everybody is served.
        cors_origins: Origins of pages that may use the server from a browser.
        log_text: Put prompts and answers into the log.
        parse_special: Take special tokens that a prompt of text spells for what they are, where a
            request does not say; never in a chat.
        prompt_details: Tell how much of a prompt was cached.
        reasoning_parser: How thoughts are written, one of `reasoning.CHOICES`.
        tool_call_parser: How calls of tools are written, one of `dialects.choice.CHOICES`.
        limits: Of requests.
        grace: Seconds that running requests have to finish when the server is told to stop.
    """

    names: Sequence[str]
    api_keys: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    log_text: bool = False
    parse_special: bool = False
    prompt_details: bool = False
    reasoning_parser: str = "none"
    tool_call_parser: str = "auto"
    limits: Limits = field(default_factory=Limits)
    grace: float = 30.0

    def parses_special(self, request: CompletionRequest | TokenizeRequest) -> bool:
        """Whether a request's text may spell special tokens."""
        return self.parse_special if request.parse_special is None else request.parse_special


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that answers; `defaults` are SamplingParams of requests that do not set them."""

    engine: AsyncEngine
    tokenizer: Tokenizer
    chat: Chat
    text_of: TokenText
    defaults: Mapping[str, Any] = field(default_factory=dict)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and answer."""
        return self.engine.engine.runner.max_model_len

    def room(self, params: SamplingParams | None = None) -> int:
        """Most tokens of a prompt that is answered by `params`, or of one that is embedded."""
        runner = self.engine.engine.runner
        most = min(runner.max_model_len, (runner.num_blocks - 1) * runner.block_size)
        if params is None:
            return most
        default = self.engine.engine.options.default_max_tokens or 1
        return max(1, most - (params.max_tokens or default))

    @property
    def hidden_size(self) -> int:
        """Numbers of an embedding."""
        return self.engine.engine.runner.hidden_size

    @property
    def vocab_size(self) -> int:
        """Token ids below this exist."""
        return self.engine.engine.runner.vocab_size


class Service:
    """Gives the model to those who may have it.

    Attributes:
        options: Of the server.
        model: None while it loads.
        draining: Whether the server is about to stop.
        num_open: Requests that are being served.
    """

    def __init__(self, options: ServerOptions):
        self.options = options
        self.model: Model | None = None
        self.draining = False
        self.num_open = 0

    @property
    def problem(self) -> str | None:
        """Why nothing can be served now; None where all is well."""
        if self.draining:
            return "the server is shutting down"
        if self.model is None:
            return "the model is being loaded"
        return "the engine has failed; restart the server" if self.model.engine.errored else None

    def ready_model(self, name: str | None = None) -> Model:
        """The model. APIError where it cannot serve now, or is none of that name."""
        if (problem := self.problem) is not None or self.model is None:
            raise APIError(
                str(problem), status=503, code="unavailable", headers={"retry-after": "5"}
            )
        if name is not None and name not in self.options.names:
            raise APIError(
                "there is no model of this name; GET /v1/models lists them",
                status=404,
                param="model",
                code="model_not_found",
            )
        return self.model

    def admit(self) -> None:
        """APIError (429) where too many sequences are waiting already."""
        waiting = self._num_waiting()
        if waiting >= self.options.limits.max_queued:
            raise self.busy(f"{waiting} sequences are waiting")

    def check_open(self) -> None:
        """APIError (429) where too many requests are open, the one that asks being one."""
        if self.num_open > self.options.limits.max_concurrent:
            raise self.busy(f"{self.num_open - 1} requests are open")

    def _num_waiting(self) -> int:
        return self.model.engine.stats().num_waiting if self.model else 0

    def busy(self, what: str) -> APIError:
        """The refusal (429) of what may be asked again later."""
        return APIError(
            f"{what}; try again later",
            status=429,
            code="rate_limit_exceeded",
            headers={"retry-after": str(min(60, 1 + self._num_waiting() // 32))},
        )
