"""The parent's end: contenders as processes that wait, take a turn when told, and report.

Only one contender computes at a time; the others sleep on a pipe. A worker writes one JSON line
when it is ready and one for each turn: {"seconds": s, "losses": [...], ...}.
"""

import math
import os
import sys
import time
from pathlib import Path

from bench.child import Child, ContenderFailed, free_port, replies
from bench.spec import Spec

__all__ = ["Contender", "ContenderFailed"]

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
        count = NUM_DEEPSPEED_PROCESSES if spec.framework == "deepspeed" else 1
        port = free_port()
        self._children = [self._launch(rank, count, port) for rank in range(count)]
        try:
            self.about = self._replies()[0]
        except BaseException:
            self.close(patience=0)
            raise
        self.losses: list[float] = self.about.pop("losses")

    def close(self, patience: float = 10) -> None:
        """End its processes, by force those that are not done in `patience` seconds."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.close(patience)

    def turn(self, steps: int) -> float:
        """Run `steps` steps; returns seconds."""
        for child in self._children:
            child.send(str(steps))
        answers = self._replies()
        self.losses += answers[0]["losses"]
        return max(answer["seconds"] for answer in answers)

    def _launch(self, rank: int, count: int, port: int) -> Child:
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
        return Child([python, "-m", "bench.worker", self.spec.to_json()], env)

    def _replies(self) -> list[dict]:
        """One line from each process, in their order."""
        return replies(self._children, min(time.monotonic() + TIMEOUT, self._deadline))
