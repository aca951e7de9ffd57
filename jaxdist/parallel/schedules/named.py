"""The schedules that have a name, each a table by a formula."""

from collections.abc import Callable

import numpy as np

from jaxdist.config import UsageError
from jaxdist.config.errors import did_you_mean
from jaxdist.parallel.schedules.csv_file import read_table
from jaxdist.parallel.schedules.rings import IDLE
from jaxdist.parallel.schedules.schedule import Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with packed ticks (PipeDream-flush, arXiv 2006.09503): time (M+S-1)(F+B).

    Stage s forwards microbatch t-s and, in the same tick, takes back t-2(S-1)+s.
    """
    tick, stage = _grid(num_microbatches + 2 * (num_stages - 1), num_stages)
    return Schedule(
        "1f1b",
        _valid(tick - stage, num_microbatches),
        _valid(tick - 2 * (num_stages - 1) + stage, num_microbatches),
    )


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards; holds every activation."""
    half = num_microbatches + num_stages - 1
    tick, stage = _grid(2 * half, num_stages)
    return Schedule(
        "gpipe",
        _valid(tick - stage, num_microbatches),
        _valid(tick - half - (num_stages - 1) + stage, num_microbatches),
    )


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B whose weight gradients wait (ZB-H1, arXiv 2401.10241) for ticks that 1F1B idles in.

    Time M(F+B+W) + (S-1)(F+B-W) where F, B and W take equally long and M >= 2(S-1). No stage makes
    them while the first backwards travel up, nor while its forwards run out, so those ticks are
    shorter. What is owed is made in the last ticks, each cut in two: cotangents on their way up
    beside weight gradients, then weight gradients on all stages.

    A backward in two halves costs about a tenth of a step more (one CPU core, 3 layers of width
    288: 4.59 s against 1F1B's 4.18 s on one stage, where there is no bubble to fill) and a ring of
    taps. It pays where 1F1B's bubble is more than that, for M below about 6(S-1).
    """
    base = one_f_one_b(num_stages, num_microbatches)
    forward, backward, weight = [], [], []
    pending: list[list[int]] = [[] for _ in range(num_stages)]
    empty = np.full(num_stages, IDLE, np.int32)

    def add(f: np.ndarray, b: np.ndarray, may: np.ndarray) -> None:
        for stage in np.flatnonzero(b != IDLE):
            pending[stage].append(int(b[stage]))
        w = [queue.pop(0) if queue and ok else IDLE for queue, ok in zip(pending, may, strict=True)]
        forward.append(f)
        backward.append(b)
        weight.append(np.array(w, np.int32))

    for tick, (f, b) in enumerate(zip(base.forward, base.backward, strict=True)):
        if tick < 2 * (num_stages - 1):
            add(f, b, np.zeros(num_stages, bool))
        elif tick < num_microbatches:
            add(f, b, np.ones(num_stages, bool))
        elif tick < num_microbatches + num_stages - 1:
            add(f, b, f == IDLE)
        else:
            add(f, b, b == IDLE)
            add(empty, empty, np.ones(num_stages, bool))
    while any(pending):
        add(empty, empty, np.ones(num_stages, bool))
    return Schedule("zb", np.stack(forward), np.stack(backward), np.stack(weight))


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B (Megatron-LM, arXiv 2104.04473) with packed ticks: (VM+S-1)(F+B).

    F and B are those of a chunk, 1/V of a stage: the bubble is V times shorter than 1F1B's, for V
    times the ring traffic and more activations in flight. Microbatches go through their chunks in
    groups of S or a few more, so that any number from S on keeps the stages busy. Fewer than S
    leave gaps: (VS+M-1)(F+B).
    """
    forward = _chunk_by_chunk(num_stages, num_microbatches, num_chunks, reverse=False)
    backward = _chunk_by_chunk(num_stages, num_microbatches, num_chunks, reverse=True)[:, ::-1]
    # The last stage takes the first microbatch back as soon as it has forwarded its last chunk,
    # or so much later that it never waits for a larger group.
    start = (num_chunks - 1) * _spans(num_stages, num_microbatches)[0] + num_stages - 1
    empty = np.full((start, num_stages), IDLE, np.int32)
    return Schedule(
        "interleaved",
        np.concatenate([forward, empty]),
        np.concatenate([empty, backward]),
        num_chunks=num_chunks,
    )


def forward_only(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """Evaluation: the forwards of `interleaved` without a backward."""
    forward = _chunk_by_chunk(num_stages, num_microbatches, num_chunks, reverse=False)
    name = "forward_only"
    return Schedule(name, forward, np.full_like(forward, IDLE), num_chunks=num_chunks)


SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb": zero_bubble,
}


def open_schedule(
    name: str,
    num_stages: int | None,
    num_microbatches: int | None,
    num_chunks: int | None = None,
    *,
    source: str = "parallel.schedule",
) -> Schedule:
    """A schedule by its name or its CSV file, checked against what is asked of it.

    Numbers that are None are those of the file, or 4 stages, 8 microbatches, 2 chunks where they
    are interleaved. UsageError, which begins with `source`, where it cannot be.
    """
    if name.endswith(".csv"):
        found = read_table(name)
        asked = (num_stages, num_microbatches, num_chunks)
        has = (found.num_stages, found.num_microbatches, found.num_chunks)
        for what, want, own in zip(("stages", "microbatches", "chunks"), asked, has, strict=True):
            if want is not None and want != own:
                raise UsageError(f"{source}={name} has {own} {what}, not {want}")
        return found
    if name not in SCHEDULES:
        hint = did_you_mean(name, SCHEDULES)
        raise UsageError(
            f"{source}={name!r} is not known; choose {', '.join(SCHEDULES)}, or a .csv file{hint}"
        )
    num_stages, num_microbatches = num_stages or 4, num_microbatches or 8
    if name == "interleaved":
        return interleaved(num_stages, num_microbatches, num_chunks or 2)
    if num_chunks not in (None, 1):
        raise UsageError(
            f"{source}={name} has 1 chunk a stage, not {num_chunks}; choose interleaved"
        )
    return SCHEDULES[name](num_stages, num_microbatches)


def _chunk_by_chunk(
    num_stages: int, num_microbatches: int, num_chunks: int, *, reverse: bool
) -> np.ndarray:
    """[ticks, stages] groups of microbatches, each through one chunk after the other.

    Stage s runs s ticks behind the first. `reverse` takes the chunks from the last to the first.
    """
    chunks = range(num_chunks)[::-1] if reverse else range(num_chunks)
    order, first = [], 0
    for span, size in _groups(num_stages, num_microbatches):
        for chunk in chunks:
            entries = [(first + i) * num_chunks + chunk for i in range(size)]
            order += entries + [IDLE] * (span - size)
        first += size
    while order[-1] == IDLE:
        order.pop()
    tick, stage = _grid(len(order) + num_stages - 1, num_stages)
    place = tick - stage
    inside = (place >= 0) & (place < len(order))
    return np.where(inside, np.array(order)[np.clip(place, 0, len(order) - 1)], IDLE).astype(
        np.int32
    )


def _groups(num_stages: int, num_microbatches: int) -> list[tuple[int, int]]:
    """(ticks a chunk, microbatches) of each group, the largest first."""
    count = max(num_microbatches // num_stages, 1)
    sizes = [(num_microbatches + count - 1 - i) // count for i in range(count)]
    return [(max(size, num_stages), size) for size in sizes]


def _spans(num_stages: int, num_microbatches: int) -> list[int]:
    return [span for span, _ in _groups(num_stages, num_microbatches)]


def _grid(num_ticks: int, num_stages: int) -> tuple[np.ndarray, np.ndarray]:
    tick, stage = np.indices((num_ticks, num_stages), dtype=np.int32)
    return tick, stage


def _valid(microbatch: np.ndarray, num_microbatches: int) -> np.ndarray:
    inside = (microbatch >= 0) & (microbatch < num_microbatches)
    return np.where(inside, microbatch, IDLE).astype(np.int32)
