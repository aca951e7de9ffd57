"""What a person sees of a run: a bar in a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import jax
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bar

from jaxdist.config import RunConfig

_SECONDS_BETWEEN_LINES = 5.0
_WIDE = 120  # columns, from which there is room for a bar


class Progress:
    """Shows rows of metrics from step `first` (0 or the restored one) to step `last`.

    A bar where stderr is a terminal and `log.progress` is set, plain lines elsewhere; nothing but
    on process 0.
    """

    def __init__(self, config: RunConfig, first: int, last: int) -> None:
        self._last, self._skipped = last, 0
        self._shown = jax.process_index() == 0
        self._next_line = time.monotonic()
        self._since: tuple[float, int] | None = None  # time and step of the first row
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._task = TaskID(0)
        if self._shown and config.log.progress and self._console.is_terminal:
            # One text, so that a narrow terminal cuts its end.
            text = TextColumn("step {task.completed}/{task.total}  {task.description}")
            is_wide = self._console.width >= _WIDE
            columns = (BarColumn(bar_width=20), text) if is_wide else (text,)
            self._bar = Bar(*columns, console=self._console)
            self._task = self._bar.add_task("", total=last, completed=first)

    def update(self, row: Mapping[str, float]) -> None:
        """Shows the row of a step that is done."""
        if not self._shown:
            return
        step, now = int(row["step"]), time.monotonic()
        self._skipped += bool(row.get("skipped"))
        self._since = self._since or (now, step)
        text = self._describe(row, self._remaining(step, now))
        if self._bar is not None:
            # It hides the cursor, which a Ctrl-C while the step is compiled would leave so.
            self._bar.start()
            self._bar.update(self._task, completed=step, description=text)
        elif now >= self._next_line or step == self._last or "val_loss" in row:
            self._next_line = now + _SECONDS_BETWEEN_LINES
            self._console.print(f"step {step}/{self._last}  {text}")

    def say(self, text: str) -> None:
        """Prints a line of its own, above the bar."""
        if self._shown:
            self._console.print(text)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar is not None:
            self._bar.stop()

    def _describe(self, row: Mapping[str, float], remaining: timedelta | None) -> str:
        shown = [] if remaining is None else [f"left {remaining}"]
        shown += [f"{label} {form(row[name])}" for name, label, form in _FIELDS if name in row]
        if self._skipped:
            shown.append(f"skipped {self._skipped}")
        return "  ".join(shown)

    def _remaining(self, step: int, now: float) -> timedelta | None:
        """Time left at the pace since the first row, before which the step was compiled."""
        assert self._since is not None
        began, first = self._since
        if step == first:
            return None
        return timedelta(seconds=round((self._last - step) * (now - began) / (step - first)))


def _number(form: str) -> Callable[[float], str]:
    return lambda value: format(value, form)


_FIELDS: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", _number(".4f")),
    ("val_loss", "val_loss", _number(".4f")),
    ("tokens_per_second", "tokens/s", _number(",.0f")),
    ("mfu", "mfu", _number(".1%")),
    ("grad_norm", "grad_norm", _number(".3g")),
    ("learning_rate", "lr", _number(".2e")),
    ("loss_scale", "scale", _number("g")),
)
