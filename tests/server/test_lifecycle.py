"""A server's life as a process: it opens, and at SIGTERM finishes what it has begun."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from jaxdist.config import UsageError
from jaxdist.server.lifecycle import open_socket, url_of

SCRIPT = Path(__file__).with_name("fake_server.py")
BODY = {"prompt": "a", "max_tokens": 60, "stream": True, "ignore_eos": True}


@contextmanager
def started(*words: float) -> Iterator[tuple[subprocess.Popen, str]]:
    """A fake server: seconds a step, its grace, and bytes that it leaks."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen((sys.executable, str(SCRIPT), "0", *map(str, words)), **pipes) as process:
        try:
            line = process.stdout.readline() if process.stdout else ""
            assert line.startswith("ready: "), line
            yield process, line.split()[1]
        finally:
            process.kill()


class Asked(threading.Thread):
    """A stream that is read in the background."""

    def __init__(self, url: str):
        super().__init__()
        self.url, self.begun, self.events = url, threading.Event(), []
        self.start()

    def run(self) -> None:
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # the server has gone
            httpx.stream("POST", f"{self.url}/v1/completions", json=BODY, timeout=60) as answer,
        ):
            for line in answer.iter_lines():
                self.events += [line.removeprefix("data: ")] if line else []
                self.begun.set()


def test_sigterm_finishes_what_runs_and_refuses_what_comes():
    with started(0.03, 30) as (process, url):
        asked = Asked(url)
        assert asked.begun.wait(30)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        late = httpx.post(f"{url}/v1/completions", json=BODY, timeout=30)
        assert late.status_code == 503
        asked.join(30)
        assert asked.events[-1] == "[DONE]"
        last = json.loads(asked.events[-2])
        assert last["choices"][0]["finish_reason"] == "length"
        assert process.wait(20) == 0


@pytest.mark.slow
def test_what_outlasts_the_time_of_grace_is_told_so():
    with started(0.2, 0.5) as (process, url):
        asked = Asked(url)
        assert asked.begun.wait(30)
        process.send_signal(signal.SIGTERM)
        asked.join(20)
        error = json.loads(asked.events[-2])["error"]
        assert "shutting down" in error["message"] and asked.events[-1] == "[DONE]"
        assert process.wait(20) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once():
    with started(0.2, 60) as (process, url):
        asked = Asked(url)
        assert asked.begun.wait(30)
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(5) == 130
        asked.join(5)
        assert asked.events[-1] != "[DONE]"


def test_headers_without_end_are_refused():
    """Whatever HTTP parsers are installed."""
    with started(0.0, 30) as (process, url), socket.create_connection(address(url)) as client:
        client.settimeout(20)
        with contextlib.suppress(ConnectionError):  # it has hung up
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Much: " + b"a" * 10**6)
        assert client.recv(100).startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{url}/health", timeout=20).status_code == 200


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def test_a_port_that_is_taken_is_refused_before_anything_is_loaded():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="choose another --host or --port"):
            open_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(UsageError, match="cannot listen on host no.such.host"):
        open_socket("no.such.host.", 0)


def test_the_address_is_told():
    with open_socket("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
