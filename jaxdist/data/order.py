"""Which row stands where in the endless stream: a pure function of (seed, position).

Within an epoch every row comes exactly once, in an order of its own for each epoch; the border
between two epochs is no border in the stream, and a batch may lie across it. Mixtures give each
source its share of any stretch of the stream, and each source its own epochs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# A mixture's pattern repeats after this many rows; weights are kept to 1 / PERIOD.
PERIOD = 1 << 14


class Order:
    """The stream's order over groups of rows.

    Without weights there is one group. With them, group i takes weights[i] / sum(weights) of the
    stream.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None, seed: int):
        self._groups = [_endless(size, seed, i) for i, size in enumerate(sizes)]
        self._group, self._rank, self._count = _pattern(np.asarray(weights or [1.0], np.float64))

    def __getitem__(self, position: int) -> tuple[int, int]:
        """(group, row in the group) at a position of the stream, from 0."""
        block, slot = divmod(position, len(self._group))
        group = int(self._group[slot])
        return group, self._groups[group][block * int(self._count[group]) + int(self._rank[slot])]


def _endless(size: int, seed: int, group: int) -> Any:
    # grain imports jax: only the process that trains pays for it.
    import grain

    own_seed = int(np.random.SeedSequence([seed, group]).generate_state(1)[0])
    return grain.MapDataset.range(size).shuffle(seed=own_seed).repeat()


def _pattern(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of one period: (group of each slot, its rank in the group, slots of each group)."""
    if len(weights) == 1:
        return np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64)
    share = weights / weights.sum() * PERIOD
    count = np.maximum(np.floor(share).astype(np.int64), 1)
    for group in np.argsort(np.floor(share) - share, kind="stable")[: max(PERIOD - count.sum(), 0)]:
        count[group] += 1  # what rounding down left over goes to the largest remainders
    group = np.repeat(np.arange(len(weights)), count)
    rank = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    # Each group is spread evenly over the period.
    slots = np.argsort((rank + 0.5) / count[group], kind="stable")
    return group[slots], rank[slots], count
