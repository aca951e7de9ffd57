"""Pipeline schedules as data: static tables of what each stage does in each tick.

A tick may hold a forward, a backward AND a weight gradient, because the ring permute that ends it
makes every stage wait for the slowest. The executor, the tests and the planner all read the same
table, and every figure here is read off it: this is the simulator.

A stage holds `num_chunks` stretches of layers; chunk v of stage s is the v*S+s-th stretch of the
model. An entry of a table is microbatch * num_chunks + chunk, so with one chunk the microbatch.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxdist.parallel.schedules.phases import Loop, loops
from jaxdist.parallel.schedules.proof import prove
from jaxdist.parallel.schedules.rings import IDLE, Ring, tick_of

__all__ = ["IDLE", "Schedule"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """What each stage does in each tick; `IDLE` marks an empty slot.

    What the last stage forwards of its last chunk is scored in the same tick, by all stages
    together (vocabulary parallelism), so scoring needs no table of its own.

    Raises `ValueError`, naming tick and stage, where an entry is missing, repeated, or used before
    its neighbour can have delivered it.
    """

    name: str
    forward: np.ndarray  # [ticks, stages]
    backward: np.ndarray  # [ticks, stages]; all IDLE in a forward-only schedule
    weight: np.ndarray | None = None  # [ticks, stages]; None: a backward makes them along
    num_chunks: int = 1

    def __post_init__(self) -> None:
        prove(self.name, self.forward, self.backward, self.weight, self.num_chunks)

    @property
    def num_ticks(self) -> int:
        return self.forward.shape[0]

    @property
    def num_stages(self) -> int:
        return self.forward.shape[1]

    @property
    def num_microbatches(self) -> int:
        return int(self.forward.max()) // self.num_chunks + 1

    @property
    def num_entries(self) -> int:
        return self.num_microbatches * self.num_chunks

    def microbatch(self, table: np.ndarray) -> np.ndarray:
        """The microbatches of a table's entries, or IDLE."""
        return np.where(table != IDLE, table // self.num_chunks, IDLE).astype(np.int32)

    def chunk(self, table: np.ndarray) -> np.ndarray:
        """The chunks of a table's entries; 0 in an empty tick."""
        return np.where(table != IDLE, table % self.num_chunks, 0).astype(np.int32)

    def following(self, table: np.ndarray) -> np.ndarray:
        """[ticks + 1, stages] the first entry from each tick on, IDLE where none comes any more."""
        following = np.full((self.num_ticks + 1, self.num_stages), IDLE, np.int32)
        for tick in range(self.num_ticks - 1, -1, -1):
            following[tick] = np.where(table[tick] != IDLE, table[tick], following[tick + 1])
        return following

    @property
    def lead(self) -> int:
        """Ticks by which the embedding runs ahead of its forward, and its gradient behind.

        With several chunks only some ticks embed or score. One tick ahead and one behind, embedding
        and scoring fall into the same ticks, so that few kinds of tick have to be compiled.
        """
        return 0 if self.num_chunks == 1 else 1

    @cached_property
    def embed(self) -> np.ndarray:
        """[ticks] the microbatch that the first stage forwards as its first chunk."""
        return self._microbatch_at(self.forward[:, 0], chunk=0)

    @cached_property
    def score(self) -> np.ndarray:
        """[ticks] the microbatch that all stages score together."""
        return self._microbatch_at(self.forward[:, -1], chunk=self.num_chunks - 1)

    @cached_property
    def embed_backward(self) -> np.ndarray:
        """[ticks] the microbatch that the first stage takes back as its first chunk."""
        return self._microbatch_at(self.backward[:, 0], chunk=0)

    @cached_property
    def score_backward(self) -> np.ndarray:
        """[ticks] the microbatch that the last stage takes back as its last chunk."""
        return self._microbatch_at(self.backward[:, -1], chunk=self.num_chunks - 1)

    @cached_property
    def residuals(self) -> Ring:
        """The ring of saved activations: from a forward to what reads them last."""
        last = self.backward if self.weight is None else self.weight
        return Ring.of(self.forward, tick_of(last, self.num_entries), self._runs("forward"))

    @cached_property
    def taps(self) -> Ring | None:
        """The ring of what a backward leaves for the weight gradients; None without their table."""
        if self.weight is None:
            return None
        gone = tick_of(self.weight, self.num_entries)
        return Ring.of(self.backward, gone, self._runs("backward"))

    @cached_property
    def down_inbox(self) -> Ring | None:
        """The ring of activations that arrive too early; None where none is overwritten.

        Written between two ticks: row t is that of what arrives for tick t.
        """
        return self._inbox(self.forward, +1, "forward")

    @cached_property
    def up_inbox(self) -> Ring | None:
        """The same of cotangents."""
        return self._inbox(self.backward, -1, "backward")

    @cached_property
    def waiting(self) -> Ring | None:
        """The ring of scored cotangents; None where the last stage takes each in its tick.

        Its entries are microbatches and its only stage is the last one.
        """
        gone = tick_of(self.score_backward[:, None], self.num_microbatches)
        born = tick_of(self.score[:, None], self.num_microbatches)
        if (gone == IDLE).any() or (gone == born).all():
            return None
        return Ring.of(self.score[:, None], gone, self._runs("score"))

    @property
    def peak_in_flight(self) -> int:
        """Largest number of entries (microbatch and chunk) whose activations one stage holds."""
        return self.residuals.peak

    @cached_property
    def loops(self) -> list[Loop]:
        """The ticks as loops of static phases.

        With one chunk, all ticks that forward also embed: the few that would not need it are the
        bubble's, and a body more would be compiled for them.
        """
        none = np.full((self.num_ticks, 1), IDLE)
        tables = {
            "forward": self.forward,
            "embed": self.embed[:, None],
            "score": self.score[:, None],
            "backward": self.backward,
            "embed_backward": self.embed_backward[:, None],
            "weight": none if self.weight is None else self.weight,
        }
        used = {kind: (table != IDLE).any(axis=1) for kind, table in tables.items()}
        full = {kind: (table != IDLE).all(axis=1) for kind, table in tables.items()}
        slots = ("forward", "backward", "weight")
        if self.num_chunks == 1:
            used |= {"embed": used["forward"], "embed_backward": used["backward"]}
            return loops(used, full, [(*slots, "score"), slots, ()])
        used["embed"] = np.append(used["embed"][1:], False)
        used["embed_backward"] = np.append(False, used["embed_backward"][:-1])
        used["vocabulary"] = used["embed"] | used["score"] | used["embed_backward"]
        return loops(used, full, [(*slots, "vocabulary"), slots, ()])

    def time(
        self,
        forward_cost: float,
        backward_cost: float,
        weight_cost: float = 0.0,
        num_layers: np.ndarray | None = None,
    ) -> float:
        """Lock-step time: every tick lasts as long as its slowest stage.

        Costs are of one chunk, `backward_cost` without the weight gradients, or where `num_layers`
        [chunks, stages] gives the layers of each chunk, of one layer.
        """
        return float(self._costs(forward_cost, backward_cost, weight_cost, num_layers).max(1).sum())

    def bubble(
        self,
        forward_cost: float = 1.0,
        backward_cost: float = 1.0,
        weight_cost: float = 1.0,
        num_layers: np.ndarray | None = None,
    ) -> float:
        """Share of the time in which stages idle, 0 to 1: the mean over the stages."""
        costs = self._costs(forward_cost, backward_cost, weight_cost, num_layers)
        return float(1.0 - costs.sum() / (self.num_stages * costs.max(axis=1).sum()))

    def _costs(
        self, forward: float, backward: float, weight: float, num_layers: np.ndarray | None
    ) -> np.ndarray:
        """[ticks, stages] what each stage spends in each tick."""
        sizes = np.ones((self.num_chunks, self.num_stages)) if num_layers is None else num_layers
        stages = np.arange(self.num_stages)

        def spent(table: np.ndarray, cost: float) -> np.ndarray:
            return np.where(table != IDLE, cost * sizes[self.chunk(table), stages], 0.0)

        if self.weight is None:
            return spent(self.forward, forward) + spent(self.backward, backward + weight)
        own = spent(self.forward, forward) + spent(self.backward, backward)
        return own + spent(self.weight, weight)

    def _microbatch_at(self, entries: np.ndarray, chunk: int) -> np.ndarray:
        is_it = (entries != IDLE) & (entries % self.num_chunks == chunk)
        return np.where(is_it, entries // self.num_chunks, IDLE).astype(np.int32)

    def _runs(self, kind: str) -> np.ndarray:
        """[ticks] whether the compiled program has a slot of this kind there."""
        runs = np.zeros(self.num_ticks, bool)
        for loop in self.loops:
            for phase in loop.phases:
                for turn in range(loop.count):
                    by = turn * loop.period
                    runs[phase.start + by : phase.stop + by] = kind in phase.used
        return runs

    def _inbox(self, table: np.ndarray, by: int, kind: str) -> Ring | None:
        """Ring of what comes over the ring permute that goes `by` stages further."""
        arrived = np.full_like(table, IDLE)
        arrived[1:] = np.roll(table[:-1], by, axis=1)
        # Over the wrap from the last stage to the first it goes on as the next chunk.
        receiver = 0 if by > 0 else self.num_stages - 1
        end = self.num_chunks - 1 if by > 0 else 0
        entries = arrived[:, receiver]
        wraps = (entries != IDLE) & (entries % self.num_chunks != end)
        arrived[:, receiver] = np.where(wraps, entries + by, IDLE)
        used = tick_of(table, self.num_entries)
        born = tick_of(arrived, self.num_entries)
        comes = born != IDLE
        runs = self._runs(kind)
        # It stays until the next tick that sends something the same way.
        sends = np.flatnonzero(runs)
        overwritten = np.append(sends, self.num_ticks)[np.searchsorted(sends, born[comes])]
        if (used[comes] <= overwritten).all():
            return None
        return Ring.of(arrived, np.where(comes, used, IDLE), np.append(False, runs[:-1]))
