"""The parent's end: contenders as processes that wait, take a turn when told, and report.

Only one contender computes at a time; the others sleep on a pipe. A worker writes one JSON line
when it is ready and one for each turn: {"seconds": s, "losses": [...], ...}.
"""

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.spec import Spec

SCRIPTS = Path(__file__).resolve().parent.parent
NUM_DEEPSPEED_PROCESSES = 2
# Seconds. torch.compile works in its first turn; DeepSpeed builds an extension when first used.
START_TIMEOUT, TURN_TIMEOUT = 900, 900

# What jaxdist.platform.keep_freed_memory asks of glibc, as a user would ask for another program.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_ARENA_MAX": "1",
}


class ContenderFailed(RuntimeError):
    """A worker ended or fell silent; the message is the last line it wrote on stderr."""


class Contender:
    """One running contender; `close` it.

    Attributes:
        spec: What it runs.
        about: What the worker says of itself: num_parameters, versions, threads.
        losses: Of all steps so far, in nats a token.
    """

    def __init__(self, spec: Spec):
        self.spec = spec
        self._log = tempfile.TemporaryFile()
        count = NUM_DEEPSPEED_PROCESSES if spec.framework == "deepspeed" else 1
        port = _free_port()
        self._processes = [self._launch(rank, count, port) for rank in range(count)]
        try:
            self.about = self._replies(START_TIMEOUT)[0]
        except BaseException:
            self.close()
            raise
        self.losses: list[float] = self.about.pop("losses")

    def close(self) -> None:
        """End its processes."""
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()
        self._log.close()

    def turn(self, steps: int) -> float:
        """Run `steps` steps; returns seconds."""
        for process in self._processes:
            assert process.stdin
            process.stdin.write(f"{steps}\n".encode())
            process.stdin.flush()
        replies = self._replies(TURN_TIMEOUT)
        self.losses += replies[0]["losses"]
        return max(reply["seconds"] for reply in replies)

    def _launch(self, rank: int, count: int, port: int) -> subprocess.Popen:
        paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.spec.keep_freed_memory:
            env |= ALLOCATOR
        if count > 1:
            cores = len(os.sched_getaffinity(0))
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // count))}
        python = self.spec.python or sys.executable
        command = [python, "-m", "bench.worker", self.spec.to_json()]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._log, env=env)

    def _replies(self, timeout: float) -> list[dict]:
        """One line from each process, in their order; all must answer within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        lines = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    raise ContenderFailed(f"no answer within {timeout:.0f} s")
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        raise ContenderFailed(self._last_words())
                    lines[key.data] += part
                    if lines[key.data].endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(line) for line in lines]

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "ended silently")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
