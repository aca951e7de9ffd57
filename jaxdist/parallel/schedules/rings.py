"""Ring buffers of a schedule, sized by interval colouring.

What is written in one tick and read for the last time in a later one holds a slot in between. All
stages run one program, so a ring has as many slots on each of them as the fullest stage needs.
"""

from dataclasses import dataclass

import numpy as np

IDLE = -1


@dataclass(frozen=True, eq=False)
class Ring:
    """Which slot of a ring each entry of a table holds.

    Attributes:
        slots: [stages, entries] the slot of an entry, from its writing to its last reading.
        writes: [ticks, stages] the slot to write in. Where a tick has nothing to write, one that
            holds nothing: what is written there all the same does no harm.
        peak: Most entries that one stage holds at once.
    """

    slots: np.ndarray
    writes: np.ndarray
    peak: int

    @classmethod
    def of(cls, written: np.ndarray, last_read: np.ndarray, runs: np.ndarray) -> "Ring":
        """Colour the lifetimes greedily, which takes the fewest slots.

        Args:
            written: [ticks, stages] the entry that is written, or IDLE.
            last_read: [stages, entries] the tick of the last reading, or IDLE: never read. A slot
                is free again in the tick after it.
            runs: [ticks] whether the program writes in this tick, be it for some stages only.
        """
        born = tick_of(written, last_read.shape[1])
        slots = np.stack([_colour(b, g) for b, g in zip(born, last_read, strict=True)])
        writes = np.zeros_like(written)
        for tick, stage in np.argwhere(runs[:, None] & np.ones_like(written, bool)):
            entry = written[tick, stage]
            if entry != IDLE:
                writes[tick, stage] = slots[stage, entry]
            else:
                is_held = (born[stage] != IDLE) & (born[stage] <= tick) & (tick <= last_read[stage])
                held = set(slots[stage, is_held].tolist())
                writes[tick, stage] = next(s for s in range(len(held) + 1) if s not in held)
        return cls(slots, writes, int(slots.max()) + 1)

    @property
    def size(self) -> int:
        """Slots of the ring, one to write into in empty ticks included."""
        return int(self.writes.max()) + 1

    def reads(self, table: np.ndarray) -> np.ndarray:
        """[ticks, stages] the slot of each entry of `table`; 0 in an empty tick."""
        found = np.take_along_axis(self.slots, np.maximum(table.T, 0), axis=1).T
        return np.where(table != IDLE, found, 0).astype(np.int32)


def tick_of(table: np.ndarray, num_entries: int) -> np.ndarray:
    """[stages, entries] the tick of each entry of a table [ticks, stages], or IDLE."""
    ticks = np.full((table.shape[1], num_entries), IDLE, np.int64)
    tick, stage = np.nonzero(table != IDLE)
    ticks[stage, table[tick, stage]] = tick
    return ticks


def _colour(born: np.ndarray, gone: np.ndarray) -> np.ndarray:
    slots = np.zeros(born.size, np.int32)
    busy_until: list[int] = []
    for entry in np.argsort(born, kind="stable"):
        if born[entry] == IDLE:
            continue
        free = (s for s, until in enumerate(busy_until) if until < born[entry])
        slot = next(free, len(busy_until))
        busy_until[slot : slot + 1] = [int(gone[entry])]
        slots[entry] = slot
    return slots
