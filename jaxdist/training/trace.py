"""`profile.steps`: a trace of some steps for xprof, in the run's folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ProfileConfig


class Trace:
    """Traces whole steps with their device work; a run that resumes among them the steps left."""

    def __init__(self, config: ProfileConfig, run_dir: Path) -> None:
        self._first, self._last = config.first_and_last or (0, 0)
        self._folder, self._is_on = run_dir / "profile", False

    @contextmanager
    def around(self, step: int, result: Callable[[], Any]) -> Iterator[None]:
        """Context of `step`, from 1, whose device work is done when `result()` is there."""
        if self._first <= step <= self._last and not self._is_on:
            jax.profiler.start_trace(self._folder)
            self._is_on = True
        yield
        if self._is_on and step == self._last:
            jax.block_until_ready(result())
            self.close()

    def close(self) -> None:
        """Write what was traced, where the run ends before the last of the steps."""
        if self._is_on:
            self._is_on = False
            jax.profiler.stop_trace()
