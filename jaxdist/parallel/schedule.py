"""Pipeline schedules as data: static tables of what each stage does in each tick, and their proof.

A tick may hold a forward AND a backward, because the ring permute that ends it makes every stage
wait for the slowest. A table says which microbatch each slot works on; the executor
(`parallel/pipeline.py`), the tests and the planner all read the same table.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

IDLE = -1


@dataclass(frozen=True)
class Phase:
    """A run of consecutive ticks in which the same kinds of slot are used somewhere."""

    start: int
    stop: int
    has_forward: bool
    has_score: bool
    has_backward: bool


@dataclass(frozen=True)
class Schedule:
    """What each stage does in each tick; `IDLE` marks an empty slot.

    The microbatch that the last stage forwards is scored in the same tick, by all stages
    together (vocabulary parallelism), so scoring needs no table of its own.

    Raises `ValueError`, naming tick and stage, where a microbatch is missing, repeated, or
    used before the neighbour has delivered it.
    """

    name: str
    forward: np.ndarray  # [ticks, stages] microbatch
    backward: np.ndarray  # [ticks, stages] microbatch; all IDLE in a forward-only schedule

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_ticks(self) -> int:
        return self.forward.shape[0]

    @property
    def num_stages(self) -> int:
        return self.forward.shape[1]

    @property
    def num_microbatches(self) -> int:
        return int(self.forward.max()) + 1

    @property
    def score(self) -> np.ndarray:
        """[ticks] the microbatch that all stages score together."""
        return self.forward[:, -1]

    @cached_property
    def forward_slots(self) -> np.ndarray:
        """[ticks, stages] ring slot in which a forward saves its activations.

        In an empty tick a slot that holds nothing: what runs there all the same does no harm.
        """
        slots = np.zeros_like(self.forward)
        for tick, stage in np.ndindex(*slots.shape):
            microbatch = self.forward[tick, stage]
            if microbatch != IDLE:
                slots[tick, stage] = self._residual_slots[stage, microbatch]
            else:
                held = self._held_slots(tick, stage)
                slots[tick, stage] = min(set(range(len(held) + 1)) - held)
        return slots

    @cached_property
    def backward_slots(self) -> np.ndarray:
        """[ticks, stages] ring slot from which a backward takes its activations.

        In an empty tick slot 0, which some forward has filled by then.
        """
        slots = np.zeros_like(self.backward)
        for tick, stage in np.argwhere(self.backward != IDLE):
            slots[tick, stage] = self._residual_slots[stage, self.backward[tick, stage]]
        return slots

    @property
    def num_residual_slots(self) -> int:
        """Slots in the ring of saved activations, the same on every stage (SPMD)."""
        return int(self.forward_slots.max()) + 1

    @property
    def waits_for_backward(self) -> bool:
        """Whether a scored microbatch waits for its backward (GPipe) or takes it in the tick."""
        forward, backward = (ticks[-1] for ticks in self._lifetimes)
        return bool((backward != forward).any() and (backward >= 0).all())

    @property
    def peak_in_flight(self) -> int:
        """Largest number of microbatches whose activations one stage holds at once."""
        return int(self._residual_slots.max()) + 1

    def phases(self) -> Iterator[Phase]:
        """The static phases that the executor compiles one loop for."""
        kinds = [
            ((f != IDLE).any(), s != IDLE, (b != IDLE).any())
            for f, s, b in zip(self.forward, self.score, self.backward, strict=True)
        ]
        start = 0
        for tick in range(1, self.num_ticks + 1):
            if tick == self.num_ticks or kinds[tick] != kinds[start]:
                yield Phase(start, tick, *(bool(kind) for kind in kinds[start]))
                start = tick

    def time(self, forward_cost: float, backward_cost: float) -> float:
        """Lock-step time: every tick lasts as long as its slowest stage."""
        cost = forward_cost * (self.forward != IDLE) + backward_cost * (self.backward != IDLE)
        return float(cost.max(axis=1).sum())

    def bubble(self, forward_cost: float = 1.0, backward_cost: float = 2.0) -> float:
        """Share of the time in which a stage idles, 0 to 1."""
        work = self.num_microbatches * (forward_cost + backward_cost)
        return 1.0 - work / self.time(forward_cost, backward_cost)

    @cached_property
    def _residual_slots(self) -> np.ndarray:
        """[stages, microbatches] slot that holds a microbatch from its forward to its backward."""
        return np.stack([self._colour(stage) for stage in range(self.num_stages)])

    @cached_property
    def _lifetimes(self) -> tuple[np.ndarray, np.ndarray]:
        """[stages, microbatches] ticks of the forward and of the backward."""
        return _tick_of(self.forward), _tick_of(self.backward)

    def _held_slots(self, tick: int, stage: int) -> set[int]:
        born, gone = (ticks[stage] for ticks in self._lifetimes)
        return set(self._residual_slots[stage, (born <= tick) & (tick <= gone)].tolist())

    def _colour(self, stage: int) -> np.ndarray:
        """Greedy interval colouring: a slot is free again after its microbatch's backward."""
        forward, backward = (ticks[stage] for ticks in self._lifetimes)
        slots = np.zeros(self.num_microbatches, np.int32)
        busy_until: list[int] = []
        for microbatch in np.argsort(forward):
            free = [s for s, until in enumerate(busy_until) if until < forward[microbatch]]
            slot = free[0] if free else len(busy_until)
            busy_until[slot : slot + 1] = [int(backward[microbatch])]
            slots[microbatch] = slot
        return slots


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


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Evaluation: the forwards of 1F1B without a backward."""
    tick, stage = _grid(num_microbatches + num_stages - 1, num_stages)
    forward = _valid(tick - stage, num_microbatches)
    return Schedule("forward_only", forward, np.full_like(forward, IDLE))


SCHEDULES = {"1f1b": one_f_one_b, "gpipe": gpipe}


def _grid(num_ticks: int, num_stages: int) -> tuple[np.ndarray, np.ndarray]:
    tick, stage = np.indices((num_ticks, num_stages), dtype=np.int32)
    return tick, stage


def _valid(microbatch: np.ndarray, num_microbatches: int) -> np.ndarray:
    inside = (microbatch >= 0) & (microbatch < num_microbatches)
    return np.where(inside, microbatch, IDLE).astype(np.int32)


def _tick_of(table: np.ndarray) -> np.ndarray:
    """[stages, microbatches] the tick of each microbatch in a [ticks, stages] table, or IDLE."""
    ticks = np.full((table.shape[1], max(int(table.max()) + 1, 1)), IDLE, np.int64)
    tick, stage = np.nonzero(table != IDLE)
    ticks[stage, table[tick, stage]] = tick
    return ticks


def _check(schedule: Schedule) -> None:
    count, last = schedule.num_microbatches, schedule.num_stages - 1
    tables = [("forward", schedule.forward)]
    if (schedule.backward != IDLE).any():
        tables.append(("backward", schedule.backward))
    for kind, table in tables:
        for stage in range(schedule.num_stages):
            seen = table[:, stage][table[:, stage] != IDLE]
            if sorted(seen) != list(range(count)):
                raise ValueError(
                    f"schedule {schedule.name!r}: stage {stage} runs the {kind} of microbatches "
                    f"{seen.tolist()}; each of 0..{count - 1} must appear exactly once"
                )
    forward = _tick_of(schedule.forward)
    for stage in range(1, schedule.num_stages):
        _arrives_next_tick(schedule.name, "forward", forward[stage - 1], forward[stage], stage)
    if len(tables) == 1:
        return
    backward = _tick_of(schedule.backward)
    for stage in range(last):
        _arrives_next_tick(schedule.name, "backward", backward[stage + 1], backward[stage], stage)
    early = np.argwhere(backward[last] < forward[last])
    if early.size:
        microbatch = int(early[0, 0])
        raise ValueError(
            f"schedule {schedule.name!r}: tick {backward[last, microbatch]}, stage {last}: "
            f"backward of microbatch {microbatch} before its forward in tick "
            f"{forward[last, microbatch]}"
        )


def _arrives_next_tick(
    name: str, kind: str, sent: np.ndarray, used: np.ndarray, stage: int
) -> None:
    wrong = np.argwhere(used != sent + 1)
    if wrong.size:
        microbatch = int(wrong[0, 0])
        raise ValueError(
            f"schedule {name!r}: tick {used[microbatch]}, stage {stage}: {kind} of microbatch "
            f"{microbatch} arrives in tick {sent[microbatch] + 1} and must run in that tick"
        )
