"""POST /v1/completions: texts that are continued."""

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from jaxdist.inference.outputs import CompletionOutput, Logprobs, RequestOutput
from jaxdist.server import sampling
from jaxdist.server.prompts import cut, encode, split
from jaxdist.server.protocol import CompletionRequest
from jaxdist.server.requests import Job, StreamUsage
from jaxdist.server.responses import Completion, CompletionChoice, CompletionLogprobs
from jaxdist.server.service import Model
from jaxdist.server.structures import structure_field
from jaxdist.server.token_text import TokenText


class CompletionJob:
    """One request and its answers."""

    def __init__(self, request: CompletionRequest, job: Job, model: Model):
        self._request, self._job, self._model = request, job, model
        self._n = request.n or 1
        self._echo = bool(request.echo)
        self._only_prompt = self._echo and request.max_tokens == 0

    async def prepare(self) -> None:
        """Check all of it. APIError where something is wrong."""
        request, job = self._request, self._job
        prompts = split(request.prompt)
        job.service.options.limits.check(request, len(prompts))
        params = sampling.of_completion(request, self._model.defaults)
        special = request.add_special_tokens is not False
        encoded = await encode(
            self._model,
            prompts,
            "prompt",
            add_special_tokens=special,
            parse_special=job.service.options.parses_special(request),
        )
        await job.prepare(
            self._model,
            cut(encoded, request.truncate_prompt_tokens, self._model.room(params)),
            params,
            priority=request.priority,
            cache_salt=request.cache_salt,
            stream=bool(request.stream),
            called={"structured_outputs": structure_field(request)},
        )

    async def whole(self) -> Completion:
        """The answer."""
        choices = []
        for i, output in enumerate(await self._job.finished()):
            for choice in output.outputs:
                piece = _Piece(self, i, output, choice)
                choices.append(piece.all())
        return self._completion(choices, usage=self._job.usage(without_answer=self._only_prompt))

    async def stream(self) -> AsyncGenerator[Completion, None]:
        """The answer in pieces; the usage in one more, where it was asked for."""
        usage = StreamUsage(
            self._request, lambda: self._job.usage(without_answer=self._only_prompt)
        )
        told: dict[int, _Told] = {}
        async with contextlib.aclosing(self._job.outputs()) as outputs:
            async for i, output in outputs:
                for choice in output.outputs:
                    piece = _Piece(self, i, output, choice)
                    new = piece.since(told.setdefault(piece.index, _Told()))
                    if new is not None:
                        yield self._completion([new], **usage.of_event())
        if usage.wanted:
            yield self._completion([], usage=usage.of_end())

    def _completion(self, choices: list[CompletionChoice], **usage: Any) -> Completion:
        return Completion(
            id=self._job.id,
            object="text_completion",
            created=self._job.created,
            model=self._job.service.options.names[0],
            choices=choices,
            **usage,
        )


class _Told:
    """What the client knows of a choice."""

    def __init__(self):
        self.begun = self.ended = False
        self.num_chars = self.num_tokens = self.offset = 0


class _Piece:
    """One choice at one moment."""

    def __init__(self, whole: CompletionJob, i: int, output: RequestOutput, now: CompletionOutput):
        self._whole, self._output, self._now = whole, output, now
        self.index = i * whole._n + now.index

    def all(self) -> CompletionChoice:
        """All of it."""
        piece = self.since(_Told())
        assert piece is not None
        return piece

    def since(self, told: _Told) -> CompletionChoice | None:
        """What is new; None where there is nothing."""
        whole, now, output = self._whole, self._now, self._output
        if told.ended:
            return None
        echo = whole._echo and not told.begun
        text = "" if whole._only_prompt else now.text[told.num_chars :]
        tokens = () if whole._only_prompt else now.token_ids[told.num_tokens :]
        wants_logprobs = whole._request.logprobs is not None
        wants_ids = whole._request.return_token_ids
        if not (text or echo or now.finish_reason or ((wants_logprobs or wants_ids) and tokens)):
            return None
        first = not told.begun
        told.num_chars += len(text)
        told.begun, told.ended = True, now.finish_reason is not None
        prompt = _text_of(output, whole._model) if echo else ""
        logprobs = None
        if wants_logprobs:
            begin, end = told.num_tokens, told.num_tokens + len(tokens)
            ids, entries = list(tokens), [*(now.logprobs or ())[begin:end]]
            if echo:
                ids = [*output.prompt_token_ids, *ids]
                entries = [*(output.prompt_logprobs or ()), *entries]
            logprobs = _logprobs(ids, entries, whole._request, whole._model.text_of, told)
        told.num_tokens += len(tokens)
        choice = CompletionChoice(
            index=self.index,
            text=prompt + text,
            logprobs=logprobs,
            **self._end(),
        )
        if wants_ids:
            choice.token_ids = list(tokens)
            if first:
                choice.prompt_token_ids = list(output.prompt_token_ids)
        if whole._request.prompt_logprobs is not None and now.finish_reason is not None:
            choice.prompt_logprobs = prompt_logprobs(output, whole._model.text_of)
        return choice

    def _end(self) -> dict[str, Any]:
        reason = self._now.finish_reason
        if self._whole._only_prompt and reason is not None:  # what it ended with was not asked for
            return {"finish_reason": "length", "stop_reason": None}
        return {
            "finish_reason": None if reason == "abort" else reason,
            "stop_reason": self._now.stop_reason,
        }


def _text_of(output: RequestOutput, model: Model) -> str:
    if output.prompt is not None:
        return output.prompt
    return model.tokenizer.decode(output.prompt_token_ids)


def _logprobs(
    ids: Sequence[int],
    entries: Sequence[Logprobs | None],
    request: CompletionRequest,
    text_of: TokenText,
    told: _Told,
) -> CompletionLogprobs:
    """Of these tokens; each with the likeliest ones and, as OpenAI has it, always itself."""

    def name(token: int) -> str:
        return text_of.name(token, request.return_tokens_as_token_ids)

    def top(token: int, entry: Logprobs) -> dict[str, float]:
        best = dict(likeliest(entry, request.logprobs or 0)) | {token: entry[token].logprob}
        return {name(i): logprob for i, logprob in best.items()}

    offsets = []
    for token in ids:
        offsets.append(told.offset)
        told.offset += len(text_of.bytes(token).decode(errors="ignore"))
    return CompletionLogprobs(
        tokens=[name(token) for token in ids],
        token_logprobs=[
            None if entry is None else entry[token].logprob
            for token, entry in zip(ids, entries, strict=True)
        ],
        top_logprobs=[
            None if entry is None else top(token, entry)
            for token, entry in zip(ids, entries, strict=True)
        ],
        text_offset=offsets,
    )


def likeliest(entry: Logprobs, count: int) -> list[tuple[int, float]]:
    """(id, log-probability) of the `count` likeliest tokens, best first."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank)
    return [(i, found.logprob) for i, found in ranked[:count]]


def prompt_logprobs(output: RequestOutput, text_of: TokenText) -> list[dict[str, Any] | None]:
    """As vLLM tells them: for each token of the prompt what was likely there, by id."""
    return [
        None
        if entry is None
        else {
            str(i): {
                "logprob": found.logprob,
                "rank": found.rank,
                "decoded_token": text_of.text(i),
            }
            for i, found in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]
