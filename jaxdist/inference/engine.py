"""The engine: requests in, outputs out, a step at a time.

`prepare` checks a request and may run on any thread; all else runs on one. A step schedules, hands
the rows to the runner, and only then waits for the results of the step before: the device always
has the next step at hand. Where a grammar must see the token before, its masks follow: the device
computes the row meanwhile, and only its sampling waits for them.
"""

import time
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.continuation import Continuation, logprobs_by_id
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.errors import RequestError
from jaxdist.inference.group import Group, requests_of
from jaxdist.inference.outputs import RequestOutput
from jaxdist.inference.preparation import Prepared, Preparer
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.replica import Replica
from jaxdist.inference.scheduling.request import Request, Status
from jaxdist.inference.scheduling.scheduler import Scheduler, Step
from jaxdist.inference.scheduling.step import NewSequence, Row, RowResult, Runner
from jaxdist.inference.stats import BlockMap, Counters, EngineStats, block_map, replica_stats


class Engine:
    """Continuous batching over a runner.

    tokenizer: None serves token ids without text. eos_ids: tokens that end a text; by default the
    tokenizer's one.
    """

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        *,
        eos_ids: Collection[int] | None = None,
    ):
        self.runner, self.tokenizer = runner, tokenizer
        self.options = options = options or EngineOptions()
        if eos_ids is None:
            eos_id = None if tokenizer is None else tokenizer.eos_id
            eos_ids = () if eos_id is None else (eos_id,)
        self.eos_ids = frozenset(eos_ids)
        share = runner.max_num_seqs // runner.num_replicas
        replicas = [
            Replica(
                i,
                num_blocks=runner.num_blocks,
                block_size=runner.block_size,
                slots=range(i * share, (i + 1) * share),
                enable_caching=options.enable_prefix_caching,
            )
            for i in range(runner.num_replicas)
        ]
        self.scheduler = Scheduler(
            replicas,
            max_num_batched_tokens=options.token_budget(runner),
            max_row_tokens=runner.max_row_tokens,
            policy=options.policy,
        )
        self.counters = Counters()
        self._groups: dict[str, Group] = {}
        self._continuations: dict[Request, tuple[Group, Continuation]] = {}
        self._in_flight: tuple[Step, object] | None = None
        self._num_arrived = 0
        self._preparer = Preparer(runner, tokenizer, self.eos_ids, options)

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **how: Any,
    ) -> Prepared:
        """Check a request, as `Preparer.prepare` says; from any thread."""
        return self._preparer.prepare(request_id, prompt, params, **how)

    def add(self, prepared: Prepared) -> None:
        """Queue a request. RequestError where its id is in use."""
        if prepared.request_id in self._groups:
            raise RequestError(
                f"a request with the id {prepared.request_id} is running; choose another id",
                param="request_id",
            )
        requests = requests_of(
            prepared,
            self.options,
            vocab_size=self.runner.vocab_size,
            num_arrived=self._num_arrived,
        )
        self._num_arrived += len(requests)
        children = [Continuation(one, self.tokenizer, self.eos_ids) for one in requests]
        group = self._groups[prepared.request_id] = Group(prepared, children)
        for child in children:
            self._continuations[child.request] = (group, child)
            self.scheduler.add(child.request)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **how: Any,
    ) -> None:
        """`prepare` and `add`."""
        self.add(self.prepare(request_id, prompt, params, **how))

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state; its last output, None where there is no such one."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        for child in group.children:
            if child.finish_reason is None:
                child.end("abort")
                self._finish(group, child)
        return group.output()

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._groups) or self._in_flight is not None

    def step(self) -> list[RequestOutput]:
        """Launch a step and take the results of the one before; what is new."""
        began, in_runner = time.perf_counter(), self.counters.runner_seconds
        changed: dict[Group, None] = {}
        if self.scheduler.must_wait():
            self._collect(changed)
        while (step := self.scheduler.schedule()) is None:
            self._collect(changed)
        self._enter(step)
        for request in self.scheduler.take_dead_ends():
            self._end(request, changed)
        launched = self._launch(step) if step.rows else None
        self._collect(changed)
        if launched is not None:
            self._send_masks(step, launched, changed)
            self._in_flight = (step, launched)
        outputs = [g.output() for g in changed if g.prepared.stream or not g.num_left]
        in_runner = self.counters.runner_seconds - in_runner
        self.counters.host_seconds += time.perf_counter() - began - in_runner
        return outputs

    def stats(self) -> EngineStats:
        """Numbers of now; from any thread."""
        scheduler = self.scheduler
        running = list(scheduler.running)
        return EngineStats(
            num_running=len(running),
            num_waiting=len(scheduler.waiting),
            num_preemptions=scheduler.num_preemptions,
            prefix_queries=scheduler.num_prefix_queries,
            prefix_hits=scheduler.num_prefix_hits,
            counters=replace(self.counters, finished=copy(self.counters.finished)),
            replicas=[replica_stats(replica, running) for replica in scheduler.replicas],
            runner=getattr(self.runner, "stats", dict)(),
        )

    def block_maps(self) -> list[BlockMap]:
        """Who holds which block, for each replica; from any thread."""
        running = list(self.scheduler.running)
        return [block_map(replica, running) for replica in self.scheduler.replicas]

    def check_integrity(self) -> None:
        """AssertionError where the books of requests, blocks and slots do not agree."""
        self.scheduler.check_integrity()
        live = {r for r, (_, child) in self._continuations.items() if child.finish_reason is None}
        assert live == {*self.scheduler.running, *self.scheduler.waiting}, "a request is lost"

    def _enter(self, step: Step) -> None:
        """Tell the runner who leaves and who comes."""
        began = time.perf_counter()
        for slot in step.stops:
            self.runner.stop(slot)
        now = time.monotonic()
        for request in step.starts:
            metrics = self._continuations[request][0].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                self.counters.prompt_tokens += len(request.prompt_ids)
            metrics.num_preemptions += request.num_preemptions > 0
            self.runner.start(
                request.slot,
                NewSequence(
                    prompt_ids=request.prompt_ids,
                    output_ids=request.tokens[len(request.prompt_ids) :],
                    params=request.params,
                    pooling=request.pooling,
                ),
            )
        self.counters.launch_seconds += time.perf_counter() - began

    def _launch(self, step: Step) -> object:
        self.counters.num_steps += 1
        self.counters.computed_tokens += sum(len(row.token_ids) for row in step.rows)
        began = time.perf_counter()
        launched = self.runner.launch(step.rows)
        self.counters.launch_seconds += time.perf_counter() - began
        return launched

    def _send_masks(self, step: Step, launched: object, changed: dict[Group, None]) -> None:
        """Bring the masks that wait for the results that have just come."""
        masks: dict[int, np.ndarray | None] = {}
        for number, (request, row) in enumerate(zip(step.requests, step.rows, strict=True)):
            if not row.masks_follow:
                continue
            masks[number] = None  # of a request that has ended: what it samples is nobody's
            if request.status is not Status.FINISHED:
                assert request.guide is not None
                shape = request.guide.shape(request.tokens, request.num_prompt_tokens, 0)
                if shape is None:
                    self._end(request, changed)
                else:
                    masks[number] = shape[1]
        if masks:
            began = time.perf_counter()
            self.runner.sample(launched, masks)
            self.counters.launch_seconds += time.perf_counter() - began

    def _end(self, request: Request, changed: dict[Group, None]) -> None:
        """End a request after which nothing may follow."""
        group, child = self._continuations[request]
        child.end("stop")
        self._finish(group, child)
        changed[group] = None

    def _collect(self, changed: dict[Group, None]) -> None:
        """Wait for the step in flight and take its results."""
        if self._in_flight is None:
            return
        (step, launched), self._in_flight = self._in_flight, None
        began = time.perf_counter()
        results = self.runner.wait(launched)
        now = time.monotonic()
        self.counters.wait_seconds += time.perf_counter() - began
        self.scheduler.landed(step)
        for request, row, result in zip(step.requests, step.rows, results, strict=True):
            if request.status is Status.FINISHED:
                self.runner.stop(self.scheduler.release(request))
                continue
            group, child = self._continuations[request]
            if self._take(group, child, row, result, now):
                changed[group] = None

    def _take(
        self, group: Group, child: Continuation, row: Row, result: RowResult, now: float
    ) -> bool:
        """Take one row's result; whether there is something new to tell."""
        request = child.request
        if result.prompt_logprobs and group.prompt_logprobs is not None and request.index == 0:
            known = group.prompt_logprobs
            for offset, found in enumerate(result.prompt_logprobs, start=row.position + 1):
                if offset == len(known):  # after a preemption they come again
                    known.append(logprobs_by_id(request.prompt_ids[offset], found))
        if not row.sample:
            self.scheduler.settle(request, row, ())
            if result.hidden is None:
                return False
            group.embedding = result.hidden
            child.end("stop")
            self._finish(group, child)
            return True
        token_ids: Sequence[int] = result.token_ids
        if request.guide is not None:
            token_ids = token_ids[: request.guide.advance(token_ids)]
        token_ids = child.take(token_ids, result.logprobs)
        if child.finish_reason is None and request.guide is not None and request.guide.is_finished:
            child.end("stop")
        self.scheduler.settle(request, row, token_ids)
        counters, metrics = self.counters, group.metrics
        counters.generation_tokens += len(token_ids)
        if row.num_drafts:
            counters.num_drafts += 1
            counters.num_draft_tokens += row.num_drafts
            counters.num_accepted_tokens += len(result.token_ids) - 1
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if child.finish_reason is not None:
            self._finish(group, child)
        return True

    def _finish(self, group: Group, child: Continuation) -> None:
        request = child.request
        slot = self.scheduler.finish(request)
        if slot is not None:
            self.runner.stop(slot)
        del self._continuations[request]
        self.counters.finished[str(child.finish_reason)] += 1
        group.num_left -= 1
        if not group.num_left:
            group.metrics.finished_time = time.monotonic()
            del self._groups[group.prepared.request_id]
