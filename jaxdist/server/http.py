"""Bodies in, answers and event streams out; a client that leaves ends its request."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxdist.server.errors import APIError, wrong_field
from jaxdist.server.protocol import FIELDS
from jaxdist.server.responses import Answer

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
_BODY_SECONDS = 60.0  # for a body to arrive
_CLOSED = 499  # nobody reads it; the word that logs know for a client that left
_GONE = Response(status_code=_CLOSED)
PATIENCE = 20.0  # seconds between signs of life


async def read_body(request: Request, kind: type[Body], max_bytes: int) -> Body:
    """The body as `kind`. APIError where it is too large, too slow, no JSON or wrong."""
    raw = await _read(request, max_bytes)
    try:
        # Refuses NaN, lone surrogates, and what is nested more than 200 deep.
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise APIError(f"the body is not JSON ({error})"[:300], code="invalid_json") from None
    if not isinstance(value, dict):
        raise APIError("the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise wrong_field(error, FIELDS) from None


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = APIError(
        f"the body is larger than {max_bytes} bytes", status=413, code="request_too_large"
    )
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise APIError(f"the body did not arrive within {_BODY_SECONDS:g} s", status=408) from None
    except ClientDisconnect:
        raise APIError("the client left", status=_CLOSED) from None
    return b"".join(chunks)


async def unless_gone(receive: Receive, work: Awaitable[Result]) -> Result | None:
    """The result of `work`; None, with the work cancelled, where the client leaves before."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait((working,))
    return None if working.cancelled() else working.result()


def json_answer(answer: Answer, headers: dict[str, str] | None = None) -> Response:
    """An answer that is whole."""
    return Response(answer.json_bytes(), media_type="application/json", headers=headers)


def error_answer(error: APIError) -> Response:
    """A refusal."""
    return Response(
        to_json(error.body()), error.status, media_type="application/json", headers=error.headers
    )


class LongAnswer(Response):
    """The answer that `work` comes to, with a sign of life every `PATIENCE` seconds till then.

    The sign is a space, with which JSON may begin: proxies and clients hang up on a line that says
    nothing, many after a minute. A refusal after the first one cuts the answer off, since the
    status has been sent; to clients that is a failed connection.
    """

    media_type = "application/json"

    def __init__(self, work: Awaitable[Answer]):
        self.status_code, self.background = 200, None
        self.init_headers()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if await unless_gone(receive, self._send_all(scope, receive, send)) is None:
            await _GONE(scope, receive, send)

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> bool:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        working, begun = asyncio.ensure_future(self._work), False
        try:
            while not (await asyncio.wait((working,), timeout=PATIENCE))[0]:
                if not begun:
                    head = {"status": self.status_code, "headers": self.raw_headers}
                    await send({"type": "http.response.start", **head})
                    begun = True
                await write(b" ")
            if not begun:
                await json_answer(working.result())(scope, receive, send)
            elif not isinstance(working.exception(), APIError):
                await write(working.result().json_bytes(), more=False)
        except OSError:  # the client left between two writes
            return False
        finally:
            working.cancel()
            await asyncio.wait((working,))
        return True


class EventStream(Response):
    """Server-sent events: `data: ...` for each answer, then `data: [DONE]`.

    An error in the midst is an event too, since the status has been sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[Answer, None],
        on_error: Callable[[Exception], APIError],
        *,
        done: bool = True,
    ):
        self.status_code, self.background = 200, None
        # Proxies would hold events back until their buffers are full.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._events, self._on_error, self._done = events, on_error, done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            try:
                async for event in self._events:
                    await write(b"data: " + event.json_bytes() + b"\n\n")
            except Exception as error:  # whatever it is, the client is told
                await write(b"data: " + to_json(self._on_error(error).body()) + b"\n\n")
            await write(b"data: [DONE]\n\n" if self._done else b"", more=False)
        except OSError:  # the client left between two writes
            return
        finally:
            await self._events.aclose()
