"""Load on an OpenAI endpoint: streams of many requests at once, timed event by event."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from bench.serving.latency import Answer


class EndpointError(RuntimeError):
    """The endpoint cannot be asked at all."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where requests go.

    Attributes:
        url: Of the server, with or without /v1.
        model: Its name there; None asks.
        chat: /v1/chat/completions in place of /v1/completions.
        api_key: Sent as a bearer token; None sends none.
        timeout: Seconds of one request.
    """

    url: str
    model: str | None = None
    chat: bool = False
    api_key: str | None = None
    timeout: float = 600.0

    @property
    def base(self) -> str:
        """The URL that ends in /v1."""
        base = self.url.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent.

    Attributes:
        prompts: Token ids or texts, one a request.
        arrivals: Seconds after the start, one a request.
        max_tokens: Of each answer: all of them, since end-of-sequence is ignored.
        max_concurrency: Requests open at a time; None: any number. Waiting for a place is no part
            of a request's latency.
        extra: Fields added to each request.
    """

    prompts: Sequence[list[int] | str]
    arrivals: Sequence[float] | np.ndarray
    max_tokens: int
    max_concurrency: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def drive(endpoint: Endpoint, load: Load) -> list[Answer]:
    """Send it all and wait for the answers. EndpointError where nobody answers."""
    return asyncio.run(_drive(endpoint, load))


async def _drive(endpoint: Endpoint, load: Load) -> list[Answer]:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=endpoint.timeout)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:
        model = endpoint.model or await _first_model(session, endpoint)
        places = asyncio.Semaphore(load.max_concurrency or len(load.prompts))
        begin = time.perf_counter()

        async def one(prompt: list[int] | str, arrival: float) -> Answer:
            await asyncio.sleep(max(0.0, begin + arrival - time.perf_counter()))
            async with places:
                return await _ask(session, endpoint, _body(endpoint, model, prompt, load))

        return await asyncio.gather(
            *(one(p, float(a)) for p, a in zip(load.prompts, load.arrivals, strict=True))
        )


async def _first_model(session: aiohttp.ClientSession, endpoint: Endpoint) -> str:
    url = f"{endpoint.base}/models"
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            return (await response.json())["data"][0]["id"]
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise EndpointError(f"{url}: {_words(error)}") from None


def _body(endpoint: Endpoint, model: str, prompt: list[int] | str, load: Load) -> dict[str, Any]:
    asked = (
        {"messages": [{"role": "user", "content": prompt}]} if endpoint.chat else {"prompt": prompt}
    )
    return {
        "model": model,
        **asked,
        "max_tokens": load.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **load.extra,
    }


async def _ask(session: aiohttp.ClientSession, endpoint: Endpoint, body: dict[str, Any]) -> Answer:
    path = "chat/completions" if endpoint.chat else "completions"
    answer = Answer(sent=time.perf_counter())
    try:
        async with session.post(f"{endpoint.base}/{path}", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200]
                answer.error = f"status {response.status}: {text}"
                return answer
            async with contextlib.aclosing(_events(response)) as events:
                async for event in events:
                    _take(answer, event)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        answer.error = _words(error)
        return answer
    if not answer.error and not answer.events:
        answer.error = "the answer holds no text"
    answer.num_tokens = answer.num_tokens or len(answer.events)
    return answer


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The objects of a stream of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def _take(answer: Answer, event: dict[str, Any]) -> None:
    if event.get("error"):
        answer.error = f"in the stream: {json.dumps(event['error'])[:200]}"
        return
    for choice in event.get("choices") or ():
        if _has_text(choice):
            answer.events.append(time.perf_counter())
    if usage := event.get("usage"):
        answer.num_tokens = usage["completion_tokens"]
        answer.num_prompt_tokens = usage["prompt_tokens"]


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event brings a token: half a character has no text yet, but counts."""
    if "text" in choice:
        return bool(choice["text"]) or choice.get("finish_reason") is None
    delta = choice.get("delta") or {}  # the first one holds a role alone
    return bool(delta.get("content") or delta.get("reasoning_content"))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
