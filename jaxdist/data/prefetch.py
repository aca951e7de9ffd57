"""A thread that makes the next steps' batches while the device works on this one."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from jaxdist.data.loader import Loader

T = TypeVar("T")


class Prefetch(Iterator[tuple[int, T]]):
    """Iterator over (step, build(loader, step)), made ahead by a thread that `close` ends.

    An error in the thread is raised by `next` in its step's turn, after the steps before it. The
    thread never keeps the interpreter from leaving.
    """

    def __init__(
        self,
        loader: Loader,
        start_step: int,
        build: Callable[[Loader, int], T],
        stop_step: int | None,
        depth: int,
    ):
        self._made: queue.Queue[tuple[int, T] | BaseException | None] = queue.Queue(depth)
        self._closed = threading.Event()
        self._over: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run,
            args=(loader, start_step, build, stop_step),
            name="prefetch",
            daemon=True,
        )
        self._thread.start()

    def __next__(self) -> tuple[int, T]:
        if self._over is None and self._closed.is_set():
            self._over = StopIteration()
        if self._over is not None:
            raise self._over
        item = self._made.get()
        if item is None or isinstance(item, BaseException):
            self._over = item or StopIteration()
            raise self._over
        return item

    def close(self) -> None:
        """End the thread, dropping what it made ahead; may be called more than once."""
        self._closed.set()
        while self._thread.is_alive():
            try:  # a thread that waits for room in the queue sees the end at once
                self._made.get_nowait()
            except queue.Empty:
                self._thread.join(0.01)

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self, loader: Loader, step: int, build: Callable[[Loader, int], T], stop_step: int | None
    ) -> None:
        try:
            while not self._closed.is_set() and (stop_step is None or step < stop_step):
                self._made.put((step, build(loader, step)))
                step += 1
            self._made.put(None)
        except BaseException as error:  # raised again where the batch is asked for
            self._made.put(error)


def prefetch(
    loader: Loader,
    start_step: int,
    build: Callable[[Loader, int], T],
    *,
    stop_step: int | None = None,
    depth: int = 2,
) -> Prefetch[T]:
    """Make `build(loader, step)` for the steps in [start_step, stop_step), up to `depth` ahead.

    ```
    with prefetch(loader, 0, lambda loader, step: place(loader.rows(step, 0, 8))) as batches:
        for step, batch in batches: ...
    ```
    """
    return Prefetch(loader, start_step, build, stop_step, depth)
