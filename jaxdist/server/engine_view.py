"""The engine as the page shows it: who holds which block, what runs, what waits."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence

from jaxdist.inference.stats import BlockMap, EngineStats, ReplicaStats
from jaxdist.server.responses import Answer
from jaxdist.server.service import Service

FREE, CACHED, SHARED = 0, 1, 2  # of a block; from 3 on it is a request's, by its place in the list
_INTERVAL = 0.4  # seconds between two views of a stream


class RunningView(Answer):
    """A running sequence: what to call it, and how many blocks it holds."""

    label: str
    num_blocks: int


class ReplicaView(Answer):
    """One replica's blocks: runs of equal ones, [kind, count] each."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int
    num_running: int
    num_slots: int
    waste: float
    blocks: list[tuple[int, int]]
    requests: list[RunningView]


class EngineView(Answer):
    """A moment of the engine."""

    state: str
    time: float
    num_running: int = 0
    num_waiting: int = 0
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_steps: int = 0
    num_compilations: int = 0
    padding_ratio: float = 0.0
    host_share: float = 0.0
    replicas: list[ReplicaView] = []


def view(service: Service) -> EngineView:
    """The engine now."""
    state = service.problem or "ready"
    if service.model is None:
        return EngineView(state=state, time=time.time())
    engine = service.model.engine
    stats: EngineStats = engine.stats()
    counters, runner = stats.counters, stats.runner
    spent = counters.host_seconds + counters.runner_seconds
    return EngineView(
        state=state,
        time=time.time(),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_preemptions=stats.num_preemptions,
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        prefix_queries=stats.prefix_queries,
        prefix_hits=stats.prefix_hits,
        num_draft_tokens=counters.num_draft_tokens,
        num_accepted_tokens=counters.num_accepted_tokens,
        num_steps=counters.num_steps,
        num_compilations=int(runner.get("num_compilations", 0)),
        padding_ratio=runner.get("padding_ratio", 0.0),
        host_share=counters.host_seconds / spent if spent else 0.0,
        replicas=[
            _replica(replica, blocks)
            for replica, blocks in zip(stats.replicas, engine.block_maps(), strict=True)
        ],
    )


async def views(service: Service) -> AsyncGenerator[EngineView, None]:
    """The engine, again and again, until the server stops."""
    while not service.draining:
        yield view(service)
        await asyncio.sleep(_INTERVAL)


def _replica(stats: ReplicaStats, blocks: BlockMap) -> ReplicaView:
    requests = [
        RunningView(
            label=f"{request_id[-8:]}{f'.{index}' if index else ''}",
            num_blocks=len(table),
        )
        for request_id, index, table in blocks.tables
    ]
    return ReplicaView(
        num_blocks=stats.num_blocks,
        num_free=stats.num_free,
        num_cached=stats.num_cached,
        num_used=stats.num_used,
        num_running=stats.num_running,
        num_slots=stats.num_slots,
        waste=stats.waste,
        blocks=_runs(_kinds(blocks)),
        requests=requests,
    )


def _kinds(blocks: BlockMap) -> list[int]:
    kinds = [CACHED if cached else FREE for cached in blocks.cached]
    for place, (_, _, table) in enumerate(blocks.tables):
        for block in table:
            kinds[block] = SHARED if blocks.holders[block] > 1 else 3 + place
    return kinds[1:]  # block 0 is nobody's


def _runs(kinds: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for kind in kinds:
        if runs and runs[-1][0] == kind:
            runs[-1] = (kind, runs[-1][1] + 1)
        else:
            runs.append((kind, 1))
    return runs
