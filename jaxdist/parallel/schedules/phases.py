"""The ticks of a schedule as loops: what the executor compiles.

Ticks that use the same kinds of slot share a body, and stretches that repeat (interleaved
schedules turn through their chunks) share their bodies over a loop around them. Nothing is decided
while the program runs, so each collective's count is known when it is compiled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

MOST_BODIES = 12  # each is compiled on its own

Masks = dict[str, np.ndarray]  # kind of slot -> [ticks] bool


@dataclass(frozen=True)
class Phase:
    """A run of consecutive ticks that share a body.

    Attributes:
        start, stop: First tick, and the one after the last.
        used: Kinds of slot that some stage uses in some tick.
        full: Those that every stage uses in every tick.
    """

    start: int
    stop: int
    used: frozenset[str]
    full: frozenset[str] = field(default=frozenset())


@dataclass(frozen=True)
class Loop:
    """`phases`, run `count` times; each time `period` ticks later."""

    count: int
    period: int
    phases: tuple[Phase, ...]


def loops(used: Masks, full: Masks, told_apart: Sequence[tuple[str, ...]]) -> list[Loop]:
    """The loops over all ticks, in order.

    Args:
        used: Ticks in which some stage uses a slot of that kind.
        full: Ticks in which every stage does.
        told_apart: Kinds whose ticks get bodies of their own. Each entry is tried in turn, until
            there are at most `MOST_BODIES`; an irregular table may end with one body for all.
    """
    for kinds in told_apart:
        found = list(_repeats(list(_runs(used, kinds))))
        if sum(len(loop.phases) for loop in found) <= MOST_BODIES:
            break
    return [replace(loop, phases=tuple(_with_full(loop, full))) for loop in found]


def _runs(used: Masks, kinds: Sequence[str]) -> Iterator[Phase]:
    num_ticks = len(next(iter(used.values())))
    apart = np.array([used[kind] for kind in kinds]).reshape(len(kinds), num_ticks)
    start = 0
    for tick in range(1, num_ticks + 1):
        if tick == num_ticks or (apart[:, tick] != apart[:, start]).any():
            kinds_here = frozenset(kind for kind, mask in used.items() if mask[start:tick].any())
            yield Phase(start, tick, kinds_here)
            start = tick


def _repeats(phases: list[Phase]) -> Iterator[Loop]:
    """Wherever a stretch of phases follows itself, one loop instead."""
    shapes = [(p.stop - p.start, p.used) for p in phases]
    place = 0
    while place < len(phases):
        length, count = max(
            (
                (length, _times(shapes, place, length))
                for length in range(1, (len(phases) - place) // 2 + 1)
            ),
            key=lambda found: (found[0] * (found[1] - 1), -found[0]),
            default=(1, 1),
        )
        if count == 1:
            length = 1
        body = phases[place : place + length]
        yield Loop(count, body[-1].stop - body[0].start, tuple(body))
        place += length * count


def _times(shapes: list[tuple[int, frozenset[str]]], place: int, length: int) -> int:
    """How often the `length` phases at `place` stand there in a row."""
    first, count = shapes[place : place + length], 1
    while shapes[place + count * length : place + (count + 1) * length] == first:
        count += 1
    return count


def _with_full(loop: Loop, full: Masks) -> Iterator[Phase]:
    for phase in loop.phases:
        turns = [turn * loop.period for turn in range(loop.count)]
        kinds = frozenset(
            kind
            for kind, mask in full.items()
            if all(mask[phase.start + by : phase.stop + by].all() for by in turns)
        )
        yield replace(phase, full=kinds)
