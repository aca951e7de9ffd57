"""The engine: requests in, outputs out, a step at a time.

`prepare` checks a request and may run on any thread; all else runs on one. A step schedules, hands
the rows to the runner, and only then waits for the results of the step before: the device always
has the next step at hand.
"""

import random
import time
from collections.abc import Collection, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from jaxdist.config.errors import UsageError
from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.continuation import Continuation, logprobs_by_id
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.errors import RequestError
from jaxdist.inference.guide import Guide, bad_word_ids
from jaxdist.inference.outputs import Logprobs, RequestMetrics, RequestOutput
from jaxdist.inference.replica import Replica
from jaxdist.inference.request import Request, Status, resolve_max_tokens, whole_ids
from jaxdist.inference.sampling_params import SamplingParams, StructuredOutput
from jaxdist.inference.scheduler import Scheduler, Step
from jaxdist.inference.speculation import NgramIndex
from jaxdist.inference.stats import BlockMap, Counters, EngineStats, ReplicaStats
from jaxdist.inference.step import NewSequence, Row, RowResult, Runner


def child_seed(seed: int, index: int) -> int:
    """The seed of the continuation `index` of n; the first one's is the request's."""
    if index == 0:
        return seed
    return int.from_bytes(blake2b(f"{seed} {index}".encode(), digest_size=4).digest()) >> 1


@dataclass(kw_only=True, eq=False)
class Prepared:
    """A request that was checked, ready for `Engine.add`.

    Attributes:
        prompt: Its text, where it was given as text.
        params: Of each of the n, seeds set; one for an embedding.
        grammar: What `params.structured` compiled to.
        bad_words: Token sequences that do not appear.
        stream: Whether there is an output whenever something is new, or only the last.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: list[SamplingParams]
    max_tokens: int
    pooling: str | None = None
    priority: int = 0
    salt: Hashable = None
    grammar: Any = None
    bad_words: Sequence[tuple[int, ...]] = ()
    stream: bool = True
    arrival_time: float = field(default_factory=time.monotonic)


class _Group:
    """A request of the caller: its n continuations."""

    def __init__(self, prepared: Prepared, children: list[Continuation]):
        self.prepared, self.children = prepared, children
        self.num_left = len(children)
        self.metrics = RequestMetrics(arrival_time=prepared.arrival_time)
        self.embedding = None
        self.prompt_logprobs: list[Logprobs | None] | None = None
        if prepared.params[0].prompt_logprobs is not None and prepared.pooling is None:
            self.prompt_logprobs = [None]

    def output(self) -> RequestOutput:
        """All of it so far, as a copy."""
        finished = not self.num_left
        logprobs = self.prompt_logprobs
        return RequestOutput(
            request_id=self.prepared.request_id,
            prompt=self.prepared.prompt,
            prompt_token_ids=self.prepared.prompt_ids,
            prompt_logprobs=None if logprobs is None else list(logprobs),
            outputs=[child.output() for child in self.children],
            finished=finished,
            num_cached_tokens=max(0, self.children[0].request.num_cached_tokens),
            embedding=self.embedding,
            metrics=self.metrics,
        )


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
        self.capacity = (runner.num_blocks - 1) * runner.block_size
        self.scheduler = Scheduler(
            replicas,
            max_num_batched_tokens=options.token_budget(runner),
            max_row_tokens=runner.max_row_tokens,
            policy=options.policy,
        )
        self.counters = Counters()
        self._groups: dict[str, _Group] = {}
        self._continuations: dict[Request, tuple[_Group, Continuation]] = {}
        self._in_flight: tuple[Step, object] | None = None
        self._num_arrived = 0
        self._seeds = random.Random(options.seed)

    def prepare(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        prompt_text: str | None = None,
        pooling: str | None = None,
        priority: int = 0,
        cache_salt: Hashable = None,
        stream: bool = True,
    ) -> Prepared:
        """Check a request. RequestError names what is wrong; from any thread.

        prompt: Text, encoded without special tokens and opened by the tokenizer's bos_id, or ids
        that are taken as they are. prompt_text: what the ids spell, to be told in the output.
        pooling: "mean" or "last" to embed the prompt instead of continuing it. priority: the least
        is served first. cache_salt: only equal ones share cached blocks.
        """
        ids = self._encode(prompt) if isinstance(prompt, str) else whole_ids(prompt)
        params = params or SamplingParams()
        max_tokens = resolve_max_tokens(
            ids,
            params.max_tokens,
            embeds=pooling is not None,
            vocab_size=self.runner.vocab_size,
            max_model_len=self.runner.max_model_len,
            capacity=self.capacity,
        )
        self._check(params)
        structured = params.structured if pooling is None else None
        seed = self._seeds.getrandbits(31) if params.seed is None else params.seed
        seeds = [child_seed(seed, i) for i in range(1 if pooling else params.n)]
        return Prepared(
            request_id=request_id,
            prompt=prompt if isinstance(prompt, str) else prompt_text,
            prompt_ids=ids,
            params=[params if s == params.seed else replace(params, seed=s) for s in seeds],
            max_tokens=max_tokens,
            pooling=pooling,
            priority=priority,
            salt=cache_salt,
            grammar=None if structured is None else self._compile(structured),
            bad_words=bad_word_ids(params.bad_words, self.tokenizer) if params.bad_words else (),
            stream=stream,
        )

    def add(self, prepared: Prepared) -> None:
        """Queue a request. RequestError where its id is in use."""
        if prepared.request_id in self._groups:
            raise RequestError(
                f"a request with the id {prepared.request_id} is running; choose another id",
                param="request_id",
            )
        children: list[Continuation] = []
        for index, params in enumerate(prepared.params):
            wants_logprobs = params.prompt_logprobs is not None and index == 0
            guide = self._guide(prepared)
            request = Request(
                request_id=prepared.request_id,
                index=index,
                prompt_ids=prepared.prompt_ids,
                params=params if index == 0 else replace(params, prompt_logprobs=None),
                max_tokens=prepared.max_tokens,
                order=(prepared.priority, self._num_arrived),
                salt=prepared.salt,
                pooling=prepared.pooling,
                run_ahead=self.options.run_ahead and not (guide and guide.needs_tokens),
                guide=guide,
                reuse=not wants_logprobs and prepared.pooling != "mean",
            )
            if index and self.options.enable_prefix_caching:
                request.leader = children[0].request
            self._num_arrived += 1
            children.append(Continuation(request, self.tokenizer, self.eos_ids))
        group = self._groups[prepared.request_id] = _Group(prepared, children)
        for child in children:
            self._continuations[child.request] = (group, child)
            self.scheduler.add(child.request)

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        **how,
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
        began, waited = time.perf_counter(), self.counters.runner_seconds
        changed: dict[_Group, None] = {}
        if self.scheduler.must_wait():
            self._collect(changed)
        while (step := self.scheduler.schedule()) is None:
            self._collect(changed)
        self._enter(step)
        for request in self.scheduler.take_dead_ends():
            group, child = self._continuations[request]
            child.end("stop")
            self._finish(group, child)
            changed[group] = None
        launched = self._launch(step) if step.rows else None
        self._collect(changed)
        if launched is not None:
            self._in_flight = (step, launched)
        outputs = [g.output() for g in changed if g.prepared.stream or not g.num_left]
        waited = self.counters.runner_seconds - waited
        self.counters.host_seconds += time.perf_counter() - began - waited
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
            replicas=[self._replica_stats(replica, running) for replica in scheduler.replicas],
            runner=getattr(self.runner, "stats", dict)(),
        )

    def block_maps(self) -> list[BlockMap]:
        """Who holds which block, for each replica; from any thread."""
        running = list(self.scheduler.running)
        maps = []
        for replica in self.scheduler.replicas:
            holders, cached = replica.pool.states()
            tables = [
                (r.request_id, r.index, list(r.block_table))
                for r in running
                if r.replica == replica.index
            ]
            maps.append(BlockMap(holders=holders, cached=cached, tables=tables))
        return maps

    def check_integrity(self) -> None:
        """AssertionError where the books of requests, blocks and slots do not agree."""
        self.scheduler.check_integrity()
        live = {r for r, (_, child) in self._continuations.items() if child.finish_reason is None}
        assert live == {*self.scheduler.running, *self.scheduler.waiting}, "a request is lost"

    def _check(self, params: SamplingParams) -> None:
        """RequestError where the parameters do not suit this model."""
        try:
            params.check_against(self.runner.vocab_size)
        except UsageError as error:  # its message begins with the field
            raise RequestError(str(error), param=str(error).split(" ", 1)[0]) from None
        if self.tokenizer is None:
            for name in ("stop", "bad_words", "structured"):
                if getattr(params, name):
                    raise RequestError(
                        f"{name} needs a tokenizer, and this model has none; leave it out",
                        param=name,
                    )

    def _compile(self, structured: StructuredOutput) -> Any:
        # Only loaded where it is asked for: its library is an extra.
        from jaxdist.inference.grammar import compile as compile_grammar

        try:
            return compile_grammar(structured, self.tokenizer, sorted(self.eos_ids))
        except UsageError as error:
            raise RequestError(str(error), param="structured") from None

    def _guide(self, prepared: Prepared) -> Guide | None:
        """What the host has to say about the tokens of a continuation."""
        options = self.options
        speculates = options.num_speculative_tokens > 0
        if prepared.pooling or not (prepared.grammar or prepared.bad_words or speculates):
            return None
        return Guide(
            vocab_size=self.runner.vocab_size,
            matcher=prepared.grammar.matcher() if prepared.grammar else None,
            bad_words=prepared.bad_words,
            ngrams=NgramIndex(options.prompt_lookup_min, options.prompt_lookup_max)
            if speculates
            else None,
            most_drafts=options.num_speculative_tokens,
        )

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise RequestError("a prompt of text needs a tokenizer; give token ids", param="prompt")
        ids = self.tokenizer.encode(text)
        return ids if self.tokenizer.bos_id is None else [self.tokenizer.bos_id, *ids]

    def _enter(self, step: Step) -> None:
        """Tell the runner who leaves and who comes."""
        for slot in step.stops:
            self.runner.stop(slot)
        now = time.monotonic()
        for request in step.starts:
            metrics = self._continuations[request][0].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                self.counters.prompt_tokens += len(request.prompt_ids)
            metrics.num_preemptions += request.num_output_tokens > 0
            self.runner.start(
                request.slot,
                NewSequence(
                    prompt_ids=request.prompt_ids,
                    output_ids=request.tokens[len(request.prompt_ids) :],
                    params=request.params,
                    pooling=request.pooling,
                ),
            )

    def _launch(self, step: Step) -> object:
        self.counters.num_steps += 1
        self.counters.computed_tokens += sum(len(row.token_ids) for row in step.rows)
        return self.runner.launch(step.rows)

    def _collect(self, changed: dict[_Group, None]) -> None:
        """Wait for the step in flight and take its results."""
        if self._in_flight is None:
            return
        (step, launched), self._in_flight = self._in_flight, None
        began = time.perf_counter()
        results = self.runner.wait(launched)
        now = time.monotonic()
        self.counters.runner_seconds += time.perf_counter() - began
        self.scheduler.landed(step)
        for request, row, result in zip(step.requests, step.rows, results, strict=True):
            if request.status is Status.FINISHED:
                self.runner.stop(self.scheduler.release(request))
                continue
            group, child = self._continuations[request]
            if self._take(group, child, row, result, now):
                changed[group] = None

    def _take(
        self, group: _Group, child: Continuation, row: Row, result: RowResult, now: float
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
        token_ids = child.take(result.token_ids, result.logprobs)
        if request.guide is not None and child.finish_reason is None:
            request.guide.advance(token_ids)
            if request.guide.is_finished:
                child.end("stop")
        self.scheduler.settle(request, row, token_ids)
        counters, metrics = self.counters, group.metrics
        counters.generation_tokens += len(token_ids)
        if row.num_drafts:
            counters.num_draft_tokens += row.num_drafts
            counters.num_accepted_tokens += len(result.token_ids) - 1
        metrics.last_token_time = now
        if metrics.first_token_time is None:
            metrics.first_token_time = now
        if child.finish_reason is not None:
            self._finish(group, child)
        return True

    def _finish(self, group: _Group, child: Continuation) -> None:
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

    def _replica_stats(self, replica: Replica, running: Sequence[Request]) -> ReplicaStats:
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
