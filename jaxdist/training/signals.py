"""SIGTERM and Ctrl-C: the first asks the loop to checkpoint and stop, a Ctrl-C after it aborts."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

ABORTED = 130  # 128 + SIGINT, as shells report it
_SHOW_CURSOR = b"\x1b[?25h"  # a progress bar hides it


class StopSignals:
    """Context in which SIGTERM and SIGINT are noted instead of ending the process.

    Of several processes all stop after the same step, whichever was signalled: JAX's preemption
    service spreads a SIGTERM, so there SIGTERM is left to it and SIGINT is passed on as one.
    Enter it from the main thread, after `jax.distributed` has started.
    """

    received: int | None = None
    """The first signal that this process itself has had."""

    def __enter__(self) -> StopSignals:
        self._single = jax.process_count() == 1
        self._before: dict[int, Any] = {signal.SIGINT: signal.signal(signal.SIGINT, self._note)}
        if self._single:
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def stop_after(self, step: int) -> bool:
        """Whether to stop after `step`; all processes ask after every step, and agree."""
        if self._single:
            return self.received is not None
        return multihost_utils.reached_preemption_sync_point(step)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # os.write: a handler may interrupt a print that holds the stream's lock.
        if number == signal.SIGINT and self.received is not None:
            os.write(2, (_SHOW_CURSOR if sys.stderr.isatty() else b"") + b"aborted\n")
            os._exit(ABORTED)
        if self.received is None:
            self.received = number
            os.write(2, b"stopping after this step; Ctrl-C now aborts without a checkpoint\n")
            if not self._single:
                os.kill(os.getpid(), signal.SIGTERM)
