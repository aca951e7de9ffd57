"""Which steps are traced: those asked for, in one stretch, whatever a run's first and last are."""

import jax
import pytest

from jaxdist.config import ProfileConfig
from jaxdist.training.trace import Trace


@pytest.fixture
def traced(monkeypatch, tmp_path):
    """`traced(asked, first, last)`: the steps of a run from `first` to `last` that are traced."""

    def run(asked: str | None, first: int, last: int) -> list[int]:
        log: list[bool] = []
        monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: log.append(True))
        monkeypatch.setattr(jax.profiler, "stop_trace", lambda: log.append(False))
        trace, steps = Trace(ProfileConfig(steps=asked), tmp_path), []
        for step in range(first, last + 1):
            with trace.around(step, lambda: None):
                steps += [step] * (log.count(True) > log.count(False))
        trace.close()
        assert log in ([], [True, False])
        return steps

    return run


@pytest.mark.parametrize(
    ("asked", "first", "last", "steps"),
    [
        ("3:5", 1, 9, [3, 4, 5]),
        ("4:4", 1, 9, [4]),
        ("3:5", 4, 9, [4, 5]),  # resumed among them
        ("3:5", 6, 9, []),
        ("3:5", 1, 4, [3, 4]),  # stopped among them
        (None, 1, 9, []),
    ],
)
def test_the_steps_asked_for(traced, asked, first, last, steps):
    assert traced(asked, first, last) == steps
