"""From the tokens of one request to its output: text, end, log-probabilities."""

from collections.abc import Collection, Sequence

from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.detokenizer import TextStream
from jaxdist.inference.outputs import CompletionOutput, FinishReason, Logprob, Logprobs
from jaxdist.inference.scheduling.request import Request
from jaxdist.inference.scheduling.step import TokenLogprobs
from jaxdist.inference.stop_strings import StopStrings


def logprobs_by_id(token_id: int, found: TokenLogprobs) -> Logprobs:
    """The chosen token's and the likeliest ones', the chosen first."""
    by_id = {token_id: Logprob(logprob=found.chosen, rank=found.rank)}
    for rank, (top_id, logprob) in enumerate(
        zip(found.top_ids, found.top_logprobs, strict=True), start=1
    ):
        by_id.setdefault(top_id, Logprob(logprob=logprob, rank=rank))
    return by_id


class Continuation:
    """What has become of one request.

    eos_ids: Tokens that end the text, where the parameters do not ignore them.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None, eos_ids: Collection[int]):
        params = request.params
        self.request = request
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self._text = ""
        self._stream = None
        if tokenizer is not None:
            self._stream = TextStream(
                tokenizer, request.prompt_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._stops = None
        if params.stop:
            self._stops = StopStrings(params.stop, include=params.include_stop_str_in_output)
        self._eos_ids = () if params.ignore_eos else eos_ids
        self._stop_ids = frozenset(params.stop_token_ids)
        self._logprobs: list[Logprobs] | None = None if params.logprobs is None else []
        self._cumulative = 0.0

    def take(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> Sequence[int]:
        """Continue with these tokens; returns those up to the end of the output."""
        request = self.request
        count, min_tokens = request.num_output_tokens, request.params.min_tokens
        for i, token in enumerate(token_ids):
            count += 1
            if self._logprobs is not None and logprobs is not None:
                self._logprobs.append(logprobs_by_id(token, logprobs[i]))
                self._cumulative += logprobs[i].chosen
            self._add(token, may_end=count > min_tokens)
            if self.finish_reason is None and count >= request.max_tokens:
                self.end("length")
            if self.finish_reason is not None:
                return token_ids[: i + 1]
        return token_ids

    def end(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Give what waited; no token follows."""
        if self._stream is not None and not isinstance(stop_reason, str):
            text = self._stream.finish()
            if self._stops is not None:
                text = self._stops.push(text, active=False)[0] + self._stops.finish()
            self._text += text
        self.finish_reason, self.stop_reason = reason, stop_reason

    def output(self) -> CompletionOutput:
        """All of it so far, as a copy."""
        request, logprobs = self.request, self._logprobs
        return CompletionOutput(
            index=request.index,
            text=self._text,
            token_ids=request.tokens[request.num_prompt_tokens :],
            cumulative_logprob=None if logprobs is None else self._cumulative,
            logprobs=None if logprobs is None else list(logprobs),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )

    def _add(self, token: int, *, may_end: bool) -> None:
        ends = may_end and (token in self._eos_ids or token in self._stop_ids)
        if self._stream is not None and (
            not ends or self.request.params.include_stop_str_in_output
        ):
            text, stop = self._stream.push(token), None
            if self._stops is not None:
                text, stop = self._stops.push(text, active=may_end)
            self._text += text
            if stop is not None and not ends:
                self.end("stop", stop)
                return
        if ends:
            self.end("stop", None if token in self._eos_ids else token)
