"""In front of all routes: who may come in, who comes from elsewhere, and the line in the log."""

import hashlib
import hmac
import ipaddress
import logging
import socket
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxdist.server.errors import APIError
from jaxdist.server.http import error_answer
from jaxdist.server.requests import log_line
from jaxdist.server.service import Service

_GUARDED = ("/v1/", "/tokenize", "/detokenize", "/engine")


class Gate:
    """ASGI middleware. It leaves `salt` and takes `job` in the scope's state."""

    def __init__(self, app: ASGIApp, service: Service):
        self._app, self._service = app, service
        self._keys = [key.encode() for key in service.options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, started = time.monotonic(), 0, False
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                job = state.get("job")
                if job is not None:
                    MutableHeaders(scope=message)["x-request-id"] = job.id
            await send(message)

        works = scope["method"] == "POST"
        self._service.num_open += works
        try:
            state["salt"] = self._salt(scope)
            _check_framing(scope)
            if works:  # before its body takes room
                self._service.check_open()
            await self._app(scope, receive, noted)
        except APIError as error:
            await error_answer(error)(scope, receive, noted)
        except Exception:  # a fault of ours: the client gets an error object, the log the place
            logging.getLogger("jaxdist.server").exception("a request failed")
            status = 500
            if not started:
                failure = APIError("the server has failed", status=500, code="server_error")
                await error_answer(failure)(scope, receive, noted)
        finally:
            if works:  # while it counts as open: who waits for the last one finds its line
                self._log(scope, status, time.monotonic() - began)
            self._service.num_open -= works

    def _salt(self, scope: Scope) -> str | None:
        """Which tenant's cached prompts may be used: those of the same key. APIError: no entry."""
        headers = Headers(scope=scope)
        self._check_origin(scope, headers)
        if not self._keys or not scope["path"].startswith(_GUARDED) or scope["method"] == "OPTIONS":
            return None
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = given.strip().encode("latin-1", errors="replace")
        # All are compared, in constant time each.
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        if kind.lower() != "bearer" or not any(matches):
            raise APIError(
                "a valid API key is missing; send the header Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return hashlib.sha256(key).hexdigest()[:16]

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """A web page from elsewhere could have its visitor's browser use a server on localhost."""
        origin = headers.get("origin")
        allowed = self._service.options.cors_origins
        if scope["method"] in ("GET", "HEAD", "OPTIONS") or origin is None or "*" in allowed:
            return
        if origin not in allowed and not self._is_own(origin, headers.get("host")):
            raise APIError(
                "pages of other origins may not use this server; --cors-origin allows one",
                status=403,
                code="origin_not_allowed",
            )

    def _is_own(self, origin: str, host: str | None) -> bool:
        """Whether a page is of this server."""
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:  # it is no address
            return False
        # A page may have had its own name point at this machine; a key it does not know.
        return parts.netloc == host and (bool(self._keys) or _is_no_ones_name(name))

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        job = scope["state"].get("job")
        client = scope.get("client") or ("", 0)
        log_line(
            time=round(time.time(), 3),
            path=scope["path"][:100],
            status=status,
            seconds=round(seconds, 4),
            client=client[0],
            **({} if scope["state"].get("salt") is None else {"key": scope["state"]["salt"][:8]}),
            **({} if job is None else job.describe()),
        )


def _check_framing(scope: Scope) -> None:
    """A body whose length is said in two ways is how requests are smuggled (RFC 9112, 6.1)."""
    names = {name for name, _ in scope["headers"]}
    if {b"transfer-encoding", b"content-length"} <= names:
        raise APIError(
            "Transfer-Encoding and Content-Length exclude each other; send one",
            headers={"connection": "close"},
        )


def _is_no_ones_name(host: str) -> bool:
    """Whether no one else can have a name of the network lead here: an address, or our own name."""
    if host in ("localhost", socket.gethostname().lower()) or host.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
