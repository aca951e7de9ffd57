"""The parent's end of serving: engines in workers, and jaxdist's server under a client's load."""

import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol

import numpy as np

from bench.child import Child, ContenderFailed, free_port, replies
from bench.serving.client import Endpoint, Load, drive
from bench.serving.spec import BLOCK_SIZE, POOL_TOKENS, EngineSpec, Reply

SCRIPTS = Path(__file__).resolve().parents[2]
TIMEOUT = 1800  # seconds: a first start compiles everything
POLL = 0.05  # seconds between looks at a server that starts


class Contender(Protocol):
    """What takes turns."""

    about: dict

    def turn(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        """Continue the prompts; `ContenderFailed` where it cannot."""
        ...

    def close(self, patience: float = 10) -> None:
        """End it."""
        ...


def start(spec: EngineSpec, cache: Path | None = None) -> Contender:
    """The spec's contender, ready. `ContenderFailed` where it does not come up."""
    return Served(spec, cache) if spec.framework == "http" else InWorker(spec, cache)


class InWorker:
    """An engine called from Python, in a process of its own."""

    def __init__(self, spec: EngineSpec, cache: Path | None = None):
        command = [spec.python or sys.executable, "-m", "bench.serving.worker", spec.to_json()]
        self._child = Child(command, _environment(cache))
        with _closed_on_error(self._child):
            self.about = self._reply()

    def turn(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        """See `Contender`."""
        self._child.send(json.dumps({"prompts": prompts, "new_tokens": new_tokens}))
        return Reply(**self._reply())

    def close(self, patience: float = 10) -> None:
        """See `Contender`."""
        self._child.close(patience)

    def _reply(self) -> dict:
        return replies([self._child], time.monotonic() + TIMEOUT)[0]


class Served:
    """`python -m jaxdist.serve`, asked over HTTP by one client a prompt, all at once.

    Attributes:
        about: start_seconds from its command to its being ready.
    """

    def __init__(self, spec: EngineSpec, cache: Path | None = None):
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        command = [spec.python or sys.executable, "-m", "jaxdist.serve", "--model", spec.model]
        command += ["--port", str(port), "--max-num-seqs", str(spec.max_num_seqs)]
        command += ["--mesh", spec.mesh, "--block-size", str(BLOCK_SIZE)]
        command += [] if spec.mesh == "auto" else ["--simulate"]
        command += ["--max-model-len", str(spec.max_model_len)]
        command += ["--num-blocks", str(POOL_TOKENS // BLOCK_SIZE)]
        begin = time.monotonic()
        self._child = Child(command, _environment(cache), answers=False)
        with _closed_on_error(self._child):
            self._wait_until_ready(begin + TIMEOUT)
        self.about = {"start_seconds": time.monotonic() - begin}

    def turn(self, prompts: list[list[int]], new_tokens: int) -> Reply:
        """See `Contender`."""
        load = Load(prompts=prompts, arrivals=np.zeros(len(prompts)), max_tokens=new_tokens)
        begin = time.perf_counter()
        answers = drive(Endpoint(url=self._url), load)
        seconds = time.perf_counter() - begin
        if wrong := [answer.error for answer in answers if answer.error]:
            raise ContenderFailed(f"{len(wrong)} of {len(answers)} requests failed: {wrong[0]}")
        return Reply(seconds=seconds, counts=[answer.num_tokens for answer in answers])

    def close(self, patience: float = 10) -> None:
        """See `Contender`."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.process.pid, signal.SIGTERM)
        self._child.close(patience)

    def _wait_until_ready(self, deadline: float) -> None:
        while True:
            if self._child.process.poll() is not None:
                raise self._child.failure()
            with contextlib.suppress(urllib.error.URLError, OSError):
                with urllib.request.urlopen(f"{self._url}/ready", timeout=10):
                    return
            if time.monotonic() > deadline:
                raise ContenderFailed(f"the server was not ready in {TIMEOUT} s")
            time.sleep(POLL)


@contextlib.contextmanager
def _closed_on_error(child: Child):
    """End a child that does not come up, or whose start is interrupted."""
    try:
        yield
    except BaseException:
        child.close(patience=0)
        raise


def _environment(cache: Path | None) -> dict[str, str]:
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if cache is not None:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    return env
