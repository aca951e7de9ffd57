import os
import pty
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxdist.config import LogConfig, RunConfig
from jaxdist.training import progress
from jaxdist.training.progress import Progress

ROW = {
    "step": 3,
    "loss": 2.34567,
    "grad_norm": 0.8312,
    "learning_rate": 3e-4,
    "tokens": 12288,
    "tokens_per_second": 12345.6,
    "mfu": 0.4312,
}


@pytest.fixture
def clock(monkeypatch):
    """A clock that tests move by hand."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.seconds)
    return now


def test_a_line_holds_every_figure(capsys):
    Progress(RunConfig(), 0, 10).update({**ROW, "loss_scale": 65536.0})
    assert capsys.readouterr().err == (
        "step 3/10  loss 2.3457  tokens/s 12,346  mfu 43.1%  grad_norm 0.831  lr 3.00e-04  "
        "scale 65536\n"
    )


def test_without_a_terminal_a_line_every_few_seconds(capsys, clock):
    shown = Progress(RunConfig(), 0, 10)
    for step in range(1, 11):
        clock.seconds += 2
        shown.update({**ROW, "step": step})
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]


def test_time_left_is_at_the_pace_since_the_first_step(capsys, clock):
    shown = Progress(RunConfig(), 0, 101)
    for step, seconds in ((1, 60), (2, 69), (3, 78)):  # the first minute was compilation
        clock.seconds = seconds
        shown.update({**ROW, "step": step})
    lines = capsys.readouterr().err.splitlines()
    assert "left" not in lines[0]
    assert "step 3/101  left 0:14:42  loss" in lines[2]  # 98 steps of 9 s


def test_skipped_steps_are_counted_and_validation_is_shown_at_once(capsys, clock):
    shown = Progress(RunConfig(), 0, 10)
    shown.update({**ROW, "step": 1, "skipped": 1.0})
    shown.update({**ROW, "step": 2, "val_loss": 1.5})
    lines = capsys.readouterr().err.splitlines()
    assert "val_loss 1.5000" in lines[1] and "skipped 1" in lines[1]


def test_only_process_0_speaks(capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    shown = Progress(RunConfig(), 0, 10)
    shown.update(ROW)
    shown.say("hello")
    shown.close()
    assert capsys.readouterr().err == ""


@pytest.fixture
def drawn(monkeypatch) -> Callable[[str, int], str]:
    """`drawn(kind, columns)`: what a terminal of so many columns is sent."""

    def draw(kind: str, columns: int) -> str:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        ours, theirs = pty.openpty()
        with os.fdopen(theirs, "w") as terminal:
            monkeypatch.setattr(sys, "stderr", terminal)
            shown = Progress(RunConfig(log=LogConfig(progress=kind == "bar")), 5, 10)
            shown.update({**ROW, "step": 6})
            shown.say("a line of its own")
            shown.update({**ROW, "step": 10})
            shown.close()
            monkeypatch.undo()
        return _all_sent(ours)

    return draw


def _all_sent(ours: int) -> str:
    """What was written to a terminal; one read may give a part only, EIO says it was closed."""
    sent = b""
    with os.fdopen(ours, "rb", buffering=0) as terminal, suppress(OSError):
        while part := terminal.read(4096):
            sent += part
    return sent.decode()


@pytest.mark.parametrize(("kind", "bar"), [("bar", True), ("lines", False)])
def test_a_terminal_gets_a_bar_where_it_is_wanted(drawn, kind, bar):
    text = drawn(kind, 150)
    assert "step 10/10" in text and "loss 2.3457" in text and "a line of its own" in text
    assert ("━" in text) == bar


def test_a_narrow_terminal_keeps_step_and_time(drawn):
    text = drawn("bar", 40)
    assert "step 10/10  left 0:00:00  loss 2.34" in text and "━" not in text


def test_without_a_bar_lines_are_printed(capsys):
    config = replace(RunConfig(), log=LogConfig(progress=False))
    Progress(config, 0, 10).update(ROW)
    assert capsys.readouterr().err.startswith("step 3/10")
