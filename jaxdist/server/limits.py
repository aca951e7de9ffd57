"""How much one request, and all together, may ask for."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from jaxdist.config import limits
from jaxdist.server.errors import APIError
from jaxdist.server.protocol import Generation


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The defaults are generous for people and tight for mistakes.

    Attributes:
        max_body_bytes: Of a request's body.
        max_prompts: Prompts in one request.
        max_n: Answers to a prompt.
        max_stops: Stop texts, and stop tokens.
        max_stop_length: Characters of a stop text or bad word.
        max_biases: Entries of logit_bias and bad words.
        max_concurrent: Requests that are open at a time.
        max_queued: Sequences that wait for a slot; above it new requests are refused (429).
        request_timeout: Seconds that a request may take, waiting included.
    """

    max_body_bytes: int = 16 * 2**20
    max_prompts: int = 128
    max_n: int = 128
    max_stops: int = 16
    max_stop_length: int = 1024
    max_biases: int = 1024
    max_concurrent: int = 1024
    max_queued: int = 512
    request_timeout: float = 600.0

    def __post_init__(self):
        for field in fields(self):
            if field.type is int:
                limits.whole(_dashed(field.name), getattr(self, field.name), 1)
        limits.number("request-timeout", self.request_timeout, above=0)

    def check(self, request: Generation, num_prompts: int = 1) -> None:
        """APIError where a request asks for too much."""
        self._most("n", request.n or 1, self.max_n)
        self._most("prompt", num_prompts, self.max_prompts)
        if (request.n or 1) * num_prompts > max(self.max_n, self.max_prompts):
            raise APIError(
                f"n x prompts are more than {max(self.max_n, self.max_prompts)} sequences; "
                "send several requests",
                param="n",
            )
        stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
        self._most("stop", len(stops), self.max_stops)
        self._most("stop_token_ids", len(request.stop_token_ids or ()), self.max_stops)
        self._most("logit_bias", len(request.logit_bias or ()), self.max_biases)
        self._most("bad_words", len(request.bad_words or ()), self.max_biases)
        self._short("stop", stops)
        self._short("bad_words", request.bad_words or [])

    def _most(self, name: str, count: int, most: int) -> None:
        if count > most:
            raise APIError(f"{name}: {count} are too many; at most {most} are allowed", param=name)

    def _short(self, name: str, texts: Sequence[str]) -> None:
        longest = max(map(len, texts), default=0)
        if longest > self.max_stop_length:
            raise APIError(
                f"{name}: a text of {longest} characters is too long; at most "
                f"{self.max_stop_length} are allowed",
                param=name,
            )


def _dashed(name: str) -> str:
    return name.replace("_", "-")
