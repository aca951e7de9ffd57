"""What the engine tells about itself, for metrics and the live page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxdist.inference.scheduling.replica import Replica
from jaxdist.inference.scheduling.request import Request


@dataclass(kw_only=True)
class Counters:
    """Sums since the start.

    Attributes:
        num_steps: Steps launched.
        prompt_tokens: Of prompts, once for each request that began, n counted once.
        computed_tokens: Put through the model: recomputed ones again, drafts included.
        generation_tokens: Given out.
        finished: Requests by finish reason, each of the n counted.
        num_drafts: Rows with guesses.
        num_draft_tokens, num_accepted_tokens: Guesses, and how many were right.
        host_seconds: Spent in steps outside of the runner.
        launch_seconds: Spent by the runner on handing steps to the device.
        wait_seconds: Spent waiting for results.
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    host_seconds: float = 0.0
    launch_seconds: float = 0.0
    wait_seconds: float = 0.0

    @property
    def runner_seconds(self) -> float:
        """Spent in the runner."""
        return self.launch_seconds + self.wait_seconds


@dataclass(frozen=True, kw_only=True)
class ReplicaStats:
    """Blocks of one replica.

    Attributes:
        num_blocks: All that can be used: free, cached and used ones.
        num_free, num_cached, num_used: Their kinds, as in `BlockPool`.
        num_running: Slots taken.
        num_slots: Slots.
        waste: Share of the used blocks' places that hold no token, the last one of each request.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int
    num_running: int
    num_slots: int
    waste: float


@dataclass(frozen=True, kw_only=True)
class BlockMap:
    """Who holds the blocks of a replica.

    Attributes:
        holders: Number of requests that hold each block, by block.
        cached: Non-zero for each block that the prefix cache knows, by block.
        tables: Blocks of each running request: (request id, index of the n, its blocks).
    """

    holders: Sequence[int]
    cached: bytes
    tables: Sequence[tuple[str, int, Sequence[int]]]


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A moment of the engine; may be asked for from any thread.

    Attributes:
        num_running, num_waiting: Sequences, each of the n counted.
        num_preemptions: Since the start.
        prefix_queries, prefix_hits: Prompt tokens looked up in the prefix caches, and found.
        counters: Sums since the start.
        replicas: Blocks of each.
        runner: What the runner tells of itself (compilations, padding ratio ...), by name.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    prefix_queries: int
    prefix_hits: int
    counters: Counters
    replicas: Sequence[ReplicaStats]
    runner: Mapping[str, float]


def replica_stats(replica: Replica, running: Sequence[Request]) -> ReplicaStats:
    """Blocks of a replica, of whose requests some are among `running`."""
    pool, size = replica.pool, replica.block_size
    mine = [r for r in running if r.replica == replica.index]
    held = sum(len(r.block_table) for r in mine) * size
    tokens = sum(min(len(r.tokens) + r.num_pending, len(r.block_table) * size) for r in mine)
    return ReplicaStats(
        num_blocks=pool.num_total,
        num_free=pool.num_free,
        num_cached=pool.num_cached,
        num_used=pool.num_used,
        num_running=len(mine),
        num_slots=len(replica.slots),
        waste=1 - tokens / held if held else 0.0,
    )


def block_map(replica: Replica, running: Sequence[Request]) -> BlockMap:
    """Who holds the blocks of a replica, of whose requests some are among `running`."""
    holders, cached = replica.pool.states()
    tables = [
        (r.request_id, r.index, list(r.block_table)) for r in running if r.replica == replica.index
    ]
    return BlockMap(holders=holders, cached=cached, tables=tables)
