"""The parent's end: contenders as processes that wait, take a turn when told, and report.

Only one contender computes at a time; the others sleep on a pipe. A worker writes one JSON line
when it is ready and one for each turn: {"seconds": s, "losses": [...], ...}.
"""

import json
import math
import os
import re
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
TIMEOUT = 900

# What jaxdist.platform.keep_freed_memory asks of glibc, as a user would ask for another program.
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "2147483647",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_ARENA_MAX": "1",
}


class ContenderFailed(RuntimeError):
    """A worker ended or fell silent; the message is the last line it wrote on stderr."""

    def __init__(self, message: str, out_of_memory: bool = False):
        super().__init__(message)
        self.out_of_memory = out_of_memory


class Contender:
    """One running contender; `close` it.

    Attributes:
        spec: What it runs.
        about: What the worker says of itself: num_parameters, versions, threads.
        losses: Of all steps so far, in nats a token.
    """

    def __init__(self, spec: Spec, deadline: float = math.inf):
        """Start it and wait until it is ready.

        Raises `ContenderFailed`, as `turn` does, where an answer takes more than TIMEOUT seconds or
        does not come before `deadline`, on the clock of `time.monotonic`.
        """
        self.spec = spec
        self._deadline = deadline
        self._log = tempfile.TemporaryFile()
        count = NUM_DEEPSPEED_PROCESSES if spec.framework == "deepspeed" else 1
        port = _free_port()
        self._processes = [self._launch(rank, count, port) for rank in range(count)]
        try:
            self.about = self._replies()[0]
        except BaseException:
            self.close(patience=0)
            raise
        self.losses: list[float] = self.about.pop("losses")

    def close(self, patience: float = 10) -> None:
        """End its processes, by force those that are not done in `patience` seconds."""
        for process in self._processes:
            if process.stdin:
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=patience)
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
            try:
                process.stdin.write(f"{steps}\n".encode())
            except BrokenPipeError:
                raise self._failure() from None
        replies = self._replies()
        self.losses += replies[0]["losses"]
        return max(reply["seconds"] for reply in replies)

    def _launch(self, rank: int, count: int, port: int) -> subprocess.Popen:
        paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        if self.spec.keep_freed_memory:
            env |= ALLOCATOR
        if self.spec.device == "gpu":
            env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")  # it has the card to itself
        if count > 1:
            cores = len(os.sched_getaffinity(0))
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(max(1, cores // count))}
        python = self.spec.python or sys.executable
        command = [python, "-m", "bench.worker", self.spec.to_json()]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, bufsize=0, stdin=pipe, stdout=pipe, stderr=self._log, env=env
        )

    def _replies(self) -> list[dict]:
        """One line from each process, in their order."""
        deadline = min(time.monotonic() + TIMEOUT, self._deadline)
        lines = [b""] * len(self._processes)
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                assert process.stdout
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while selector.get_map():
                ready = selector.select(max(0, deadline - time.monotonic()))
                if not ready:
                    raise ContenderFailed("no answer in time")
                for key, _ in ready:
                    part = os.read(key.fd, 1 << 16)
                    if not part:
                        raise self._failure()
                    lines[key.data] += part
                    if lines[key.data].endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [json.loads(line) for line in lines]

    def _failure(self) -> ContenderFailed:
        self._log.seek(0)
        log = self._log.read().decode(errors="replace")
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        # JAX ends a traceback with a note on the frames that it left out.
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception|Exit)\b", line)]
        words = (errors or lines or ["ended without a word"])[-1]
        memory = re.search("out of memory|RESOURCE_EXHAUSTED", log, re.IGNORECASE)
        return ContenderFailed(words, out_of_memory=memory is not None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
