"""From the first socket to the last answer: the server's life."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from jaxdist.config.errors import CTRL_C_EXIT_CODE, UsageError
from jaxdist.server.app import make_app
from jaxdist.server.connection import Connection
from jaxdist.server.service import Model, Service

_POLL = 0.05  # seconds


class _Uvicorn(uvicorn.Server):
    """Signals are ours: those that arrive while requests run must not close the door at once."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_socket(host: str, port: int) -> socket.socket:
    """The socket to listen on. UsageError where it cannot be had; nothing was loaded yet."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
        return sock
    except (OSError, OverflowError, UnicodeError) as error:
        raise UsageError(
            f"cannot listen on host {host}, port {port} ({error}); choose another --host or --port"
        ) from None


def url_of(sock: socket.socket) -> str:
    """Where the server is reached."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def protocol(app: ASGIApp) -> uvicorn.Config:
    """How HTTP is spoken."""
    return uvicorn.Config(
        app,
        http=Connection,  # by h11, which alone bounds the headers: httptools takes what comes
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        timeout_keep_alive=75,
        h11_max_incomplete_event_size=64 * 2**10,
    )


def run(service: Service, sock: socket.socket, load: Callable[[], Model]) -> None:
    """Serve until a signal says to stop; then finish what runs. Raises what `load` raises.

    The door is open while `load` runs in a thread, so that /health and /ready are answered.
    """
    config = protocol(make_app(service))
    asyncio.run(_serve(_Uvicorn(config), service, sock, load))


async def _serve(
    server: _Uvicorn, service: Service, sock: socket.socket, load: Callable[[], Model]
) -> None:
    stop = asyncio.Event()
    _at_signals(os._exit)  # nothing is lost while the model loads
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        model = await asyncio.to_thread(load)
        await model.chat.start()
        service.model = model
        _at_signals(lambda code: stop.set())
        url = url_of(sock)
        print(f"ready: {url} (API at {url}/v1, description at {url}/docs)", flush=True)
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        _at_signals(os._exit)
        await drain(service)
    finally:
        server.should_exit = True
        await serving


def _at_signals(do: Callable[[int], object]) -> None:
    """Have the signals that stop a process call `do` with their exit code."""
    loop = asyncio.get_running_loop()
    for number, code in ((signal.SIGTERM, 0), (signal.SIGINT, CTRL_C_EXIT_CODE)):
        loop.add_signal_handler(number, do, code)


async def drain(service: Service) -> None:
    """Turn new requests away, finish what runs within the time of grace, and end the engine."""
    service.draining = True
    clock = asyncio.get_running_loop().time
    end = clock() + service.options.grace
    if service.num_open:
        logging.getLogger("jaxdist.server").warning(
            "stopping after %d running requests, in at most %g s; a second signal stops now",
            service.num_open,
            service.options.grace,
        )
    while service.num_open and clock() < end:
        await asyncio.sleep(_POLL)
    if service.model is None:
        return
    await service.model.engine.drain(0.0)  # what still runs is aborted, and its client told
    end = clock() + 2
    while service.num_open and clock() < end:
        await asyncio.sleep(_POLL)
    await asyncio.to_thread(service.model.engine.close)
