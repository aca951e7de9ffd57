"""TensorBoard's file of a run: scalars by step.

Written without tensorboardX's `SummaryWriter`, whose thread dies at a full disk: the run would then
wait for ever for room in its queue.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

_SECONDS_UNSEEN = 30.0  # for which a row may stay in the buffer


class EventFile:
    """A new file of events in `folder`; rows of `resume_step` and before stay those of others.

    Raises OSError where it cannot be written.
    """

    def __init__(self, folder: Path, resume_step: int) -> None:
        messages = vars(_module("proto.event_pb2"))
        self._event, session = messages["Event"], messages["SessionLog"]
        self._scalar = _module("summary").scalar
        folder.mkdir(parents=True, exist_ok=True)
        self._writer: Any = _module("event_file_writer").EventsWriter(str(folder / "events"))
        # TensorBoard hides what earlier files say of this step and later ones.
        start = {"session_log": session(status=session.START)}
        self._writer.write_event(self._event(step=resume_step + 1, **start))
        self.flush()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the values of a step."""
        for name, value in values.items():
            summary = self._scalar(name, value)
            self._writer.write_event(self._event(step=step, wall_time=time.time(), summary=summary))
        if time.monotonic() - self._flushed > _SECONDS_UNSEEN:
            self.flush()

    def flush(self) -> None:
        """Returns when all is on the disk."""
        self._flushed = time.monotonic()
        self._writer.flush()

    def close(self) -> None:
        """Closes the file; what a full disk still keeps from it was told by `flush`."""
        with suppress(OSError):
            self._writer.close()


def _module(name: str) -> Any:
    # tensorboardX imports torch where it is installed: seconds, for a type it is never given.
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        return importlib.import_module(f"tensorboardX.{name}")
    finally:
        if hidden:
            del sys.modules["torch"]
