"""The thread makes batches in order and ahead, ends when told to, and passes its errors on."""

import threading
import time
from typing import Any

import pytest

from jaxdist.data import prefetch

LOADER: Any = object()  # handed through to `build`, which alone knows what to do with it


def running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prefetch"]


def test_steps_come_in_order_from_the_start():
    with prefetch(LOADER, 7, lambda loader, step: (loader, step * 2), stop_step=10) as batches:
        assert list(batches) == [(step, (LOADER, step * 2)) for step in (7, 8, 9)]
        assert list(batches) == []
    assert not running()


def test_at_most_depth_batches_are_made_ahead():
    made: list[int] = []
    with prefetch(LOADER, 0, lambda _, step: made.append(step), depth=3) as batches:
        next(batches)
        until = time.monotonic() + 5
        while len(made) < 5 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.05)
        # One taken, three that wait, one that the thread holds in its hand.
        assert made == [0, 1, 2, 3, 4]


def test_errors_come_in_their_steps_turn():
    def build(_: object, step: int) -> int:
        if step == 2:
            raise OSError("disk gone")
        return step

    with prefetch(LOADER, 0, build) as batches:
        assert [next(batches), next(batches)] == [(0, 0), (1, 1)]
        for _ in range(2):
            with pytest.raises(OSError, match="disk gone"):
                next(batches)
    assert not running()


def test_close_ends_a_thread_that_waits_for_room():
    batches = prefetch(LOADER, 0, lambda _, step: step, depth=1)
    next(batches)
    batches.close()
    batches.close()
    assert not running()
    with pytest.raises(StopIteration):
        next(batches)


def test_an_error_in_the_loop_ends_the_thread():
    with pytest.raises(KeyboardInterrupt), prefetch(LOADER, 0, lambda _, step: step) as batches:
        next(batches)
        raise KeyboardInterrupt
    assert not running()
