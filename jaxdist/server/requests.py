"""One HTTP request on its way through the engine: its outputs, its time, its line in the log."""

import asyncio
import contextlib
import json
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from jaxdist.inference.engine import Prepared
from jaxdist.inference.errors import BUSY, EngineError, RequestError
from jaxdist.inference.guidance.thoughts import Opening
from jaxdist.inference.outputs import RequestOutput
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.server.errors import APIError, refused
from jaxdist.server.metrics import Metrics
from jaxdist.server.protocol import Generation, StreamOptions
from jaxdist.server.responses import PromptDetails, Usage
from jaxdist.server.service import Model, Service

log = logging.getLogger("jaxdist.server")


class Job:
    """The engine's requests that belong to one HTTP request.

    Attributes:
        id: As the client is told.
        created: In seconds since 1970.
        service, model, metrics: Who serves it.
    """

    def __init__(self, service: Service, metrics: Metrics, prefix: str, *, salt: str | None):
        self.id = f"{prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.service, self.metrics = service, metrics
        self.note: dict[str, Any] = {"id": self.id}
        self._salt = salt
        self._deadline = asyncio.get_running_loop().time() + service.options.limits.request_timeout
        self._prepared: list[Prepared] = []
        self._latest: list[RequestOutput | None] = []

    async def prepare(
        self,
        model: Model,
        prompts: Sequence[tuple[str | None, list[int]]],
        params: SamplingParams,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        pooling: str | None = None,
        opening: Opening = Opening.AFTER,
        stream: bool = False,
        called: Mapping[str, str] | None = None,
    ) -> None:
        """Check all prompts, (text, ids) each, before anything is sent.

        called: The client's names of fields that the engine calls otherwise.
        Raises APIError: wrong, or too many are waiting.
        """
        self.service.admit()
        self.model = model
        salt = None if self._salt is None and cache_salt is None else (self._salt, cache_salt)
        for i, (text, ids) in enumerate(prompts):
            try:
                prepared = await model.engine.prepare(
                    f"{self.id}-{i}",
                    ids,
                    params,
                    prompt_text=text,
                    priority=priority or 0,
                    cache_salt=salt,
                    pooling=pooling,
                    opening=opening,
                    stream=stream,
                )
            except RequestError as error:
                if error.code == BUSY:
                    raise self.service.busy(str(error)) from None
                param = (called or {}).get(error.param or "", error.param)
                raise APIError(str(error)[:1000], param=param, code=error.code) from None
            except ValueError as error:
                raise refused(str(error)) from None
            self._prepared.append(prepared)
            await asyncio.sleep(0)  # other requests have their turn
        self._latest = [None] * len(prompts)
        if self.service.options.log_text:
            texts = [text or model.tokenizer.decode(ids) for text, ids in prompts]
            self.note["prompt"] = texts if len(texts) > 1 else texts[0]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, its output so far), whenever there is something new."""
        timed = [
            self.metrics.timed(self.model.engine.outputs(prepared), prepared)
            for prepared in self._prepared
        ]
        try:
            async with contextlib.aclosing(_merged(timed)) as merged:
                while True:
                    try:
                        async with asyncio.timeout_at(self._deadline):
                            index, output = await anext(merged)
                    except StopAsyncIteration:
                        return
                    self._latest[index] = output
                    if any(choice.finish_reason == "abort" for choice in output.outputs):
                        raise APIError("the server is shutting down", status=503, code="aborted")
                    yield index, output
        except TimeoutError:
            seconds = self.service.options.limits.request_timeout
            raise APIError(
                f"the request took longer than {seconds:g} s", status=408, code="timeout"
            ) from None
        except EngineError as error:
            raise engine_failure(error) from error

    async def finished(self) -> list[RequestOutput]:
        """The last output of each prompt."""
        async with contextlib.aclosing(self.outputs()) as outputs:
            async for _ in outputs:
                continue
        return [output for output in self._latest if output is not None]

    def usage(self, *, without_answer: bool = False) -> Usage:
        """Tokens so far. without_answer: nothing was asked for, what was made is not counted."""
        prompt = sum(len(prepared.prompt_ids) for prepared in self._prepared)
        latest = [output for output in self._latest if output is not None]
        made = sum(len(choice.token_ids) for output in latest for choice in output.outputs)
        usage = Usage(
            prompt_tokens=prompt,
            completion_tokens=0 if without_answer else made,
            total_tokens=prompt if without_answer else prompt + made,
        )
        if self.service.options.prompt_details:
            cached = sum(output.num_cached_tokens for output in latest)
            usage.prompt_tokens_details = PromptDetails(cached_tokens=cached)
        return usage

    def describe(self) -> dict[str, Any]:
        """What the log says of it."""
        latest = [output for output in self._latest if output is not None]
        if not self._prepared:
            return self.note
        usage = self.usage()
        choices = [choice for output in latest for choice in output.outputs]
        note = self.note | {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": sum(output.num_cached_tokens for output in latest),
            "finish": [choice.finish_reason or "abort" for choice in choices],
        }
        times = [output.metrics for output in latest if output.metrics is not None]
        firsts = [t.first_token_time - t.arrival_time for t in times if t.first_token_time]
        if firsts:
            note["ttft"] = round(min(firsts), 4)
        if self.service.options.log_text:
            note["answers"] = [choice.text for choice in choices]
        return note


class StreamUsage:
    """What the events of a stream tell of the usage: OpenAI's null in each where it comes last, or
    vLLM's numbers of the moment.

    now: The usage so far.
    """

    def __init__(self, request: Generation, now: Callable[[], Usage]):
        options, self._now = request.stream_options or StreamOptions(), now
        wanted = options.include_usage
        self.wanted = bool(options.continuous_usage_stats if wanted is None else wanted)
        self._always = self.wanted and bool(options.continuous_usage_stats)

    def of_event(self) -> dict[str, Any]:
        """The fields of an event that is not the last."""
        if not self.wanted:
            return {}
        return {"usage": self._now() if self._always else None}

    def of_end(self) -> Usage:
        """The usage of all."""
        return self._now()


def engine_failure(error: Exception) -> APIError:
    """What a client is told where the engine could not go on."""
    if "closing" in str(error) or "closed" in str(error):
        return APIError("the server is shutting down", status=503, code="unavailable")
    return APIError("the engine has failed", status=500, code="engine_error")


def log_line(**fields: Any) -> None:
    """One line of JSON."""
    log.info("%s", json.dumps(fields, ensure_ascii=True, default=str))


async def _merged(
    streams: Sequence[AsyncGenerator[RequestOutput, None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Whatever comes next from any of the streams."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for output in stream:
                yield 0, output
        return
    tasks: dict[asyncio.Task, int] = {}
    try:
        for i, stream in enumerate(streams):
            tasks[asyncio.ensure_future(anext(stream))] = i
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = tasks.pop(task)
                if isinstance(task.exception(), StopAsyncIteration):
                    continue
                output = task.result()
                tasks[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
