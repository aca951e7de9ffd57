"""The parent's end of a worker: a process that waits on a pipe and answers in lines of JSON.

It runs in a session of its own, so that Ctrl-C reaches the parent alone, which then ends it with
all that it has started.
"""

import contextlib
import json
import os
import re
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any


class ContenderFailed(RuntimeError):
    """A worker ended or fell silent; the message is the last line it wrote on stderr."""

    def __init__(self, message: str, out_of_memory: bool = False):
        super().__init__(message)
        self.out_of_memory = out_of_memory


class Child:
    """A started process; `close` it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], *, answers: bool = True):
        """answers: whether it writes lines of JSON; else what it writes is kept as its log."""
        self._log = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if answers else self._log,
            stderr=self._log,
            env=env,
            start_new_session=True,
        )

    def send(self, line: str) -> None:
        """One line to its standard input."""
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            raise self.failure() from None

    def hang_up(self) -> None:
        """Close its standard input, which tells a worker to end."""
        if self.process.stdin:
            self.process.stdin.close()

    def close(self, patience: float = 10) -> None:
        """Hang up, and end it by force where it is not done in `patience` seconds."""
        self.hang_up()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=patience)
        with contextlib.suppress(ProcessLookupError):  # its children, where it has left some
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdout:
            self.process.stdout.close()
        self._log.close()

    def failure(self) -> ContenderFailed:
        """What its log says of its end."""
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        # JAX ends a traceback with a note on the frames that it left out.
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
        words = (errors or lines or ["ended without a word"])[-1]
        memory = re.search("out of memory|RESOURCE_EXHAUSTED", log, re.IGNORECASE)
        return ContenderFailed(words, out_of_memory=memory is not None)


def replies(children: Sequence[Child], deadline: float) -> list[Any]:
    """One line of each, in their order.

    Raises `ContenderFailed` where one ends, or has not answered at `deadline`, on the clock of
    `time.monotonic`.
    """
    lines = [b""] * len(children)
    with selectors.DefaultSelector() as selector:
        for number, child in enumerate(children):
            assert child.process.stdout
            selector.register(child.process.stdout, selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(max(0, deadline - time.monotonic()))
            if not ready:
                raise ContenderFailed("no answer in time")
            for key, _ in ready:
                part = os.read(key.fd, 1 << 16)
                if not part:
                    raise children[key.data].failure()
                lines[key.data] += part
                if lines[key.data].endswith(b"\n"):
                    selector.unregister(key.fileobj)
    return [json.loads(line) for line in lines]


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
