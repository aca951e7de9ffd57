"""A client's connection: uvicorn's, which waits for a request's head for a while and not for ever.

uvicorn itself counts only the time after an answer. Who connects and says nothing, or one header
and no more, would hold a file descriptor for as long as it likes.
"""

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0  # for a head to arrive, from the connection's begin or its own first byte


class Connection(H11Protocol):
    """HTTP/1.1. Time passes only while a head is awaited: never in a body or an answer."""

    _giving_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait."""
        super().connection_made(transport)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Stop waiting where a head is complete, else go on or begin anew."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._giving_up is None:
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._giving_up = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_waiting(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
