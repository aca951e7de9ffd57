"""Who computes what in the next step: continuous batching over a fixed number of blocks and slots.

There is no prompt phase and no decode phase: each running request's `num_computed_tokens` catches
up with the tokens it has, under a budget of tokens a step. Steps are made before the results of
the step in flight are known: what that one samples is PENDING in the next.

Every request ends in bounded steps while no more urgent ones come. Requests are served by
(priority, arrival); where blocks lack, the last running one gives up its own and is computed again
later, never an earlier one, so the first always goes on, and it fits the pool alone, which is
checked at the door. For one that waits only those of less priority make way, never its equals.
"""

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jaxdist.inference.scheduling.prefix_cache import Node
from jaxdist.inference.scheduling.replica import Replica
from jaxdist.inference.scheduling.request import Request, Status
from jaxdist.inference.scheduling.step import PENDING, Row

_MOST_COMPARED = 32  # waiting requests whose cached prefixes are looked up for `lpm` in a step
_MOST_OVERTAKEN = 256  # steps after which a waiting request is no longer overtaken under `lpm`


@dataclass(slots=True, eq=False)
class Step:
    """A step to launch: slots to stop, then requests to start, then rows of `requests`."""

    stops: list[int] = field(default_factory=list)
    starts: list[Request] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


class Scheduler:
    """The queue and the running requests of all replicas.

    policy: "fcfs", or "lpm": of equal priority the one with the longest cached prefix first.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        max_num_batched_tokens: int,
        max_row_tokens: int,
        policy: str = "fcfs",
    ):
        self.replicas = replicas
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self.num_prefix_queries = 0  # tokens looked up
        self.num_prefix_hits = 0  # tokens found
        self._budget, self._max_row_tokens = max_num_batched_tokens, max_row_tokens
        self._longest_first = policy == "lpm"
        self._num_in_flight = 0
        self._overtaken = 0
        self._dead_ends: list[Request] = []

    def add(self, request: Request) -> None:
        """Queue a request; it was checked to fit."""
        insort(self.waiting, request, key=_order)

    def must_wait(self) -> bool:
        """Whether some request's next step cannot be made before its last result is known."""
        return self._num_in_flight > 0 and any(
            request.num_pending and not request.run_ahead for request in self.running
        )

    def schedule(self) -> Step | None:
        """The next step, empty where nothing can be done; None where results must come first.

        All of it counts as launched.
        """
        step, budgets = Step(), [self._budget] * len(self.replicas)
        self._dead_ends.clear()  # those of a try that was given up
        victims = self._in_the_way()
        if victims and self._num_in_flight:
            return None
        for victim in victims:
            self._preempt(victim, step)
        for request in list(self.running):
            lacking = self._num_lacking(request)
            if lacking <= 0 or not (budget := budgets[request.replica]):
                continue
            replica, count = self.replicas[request.replica], min(lacking, self._max_row_tokens)
            count = min(count, budget)
            while not replica.grow(request, request.num_computed_tokens + count):
                if self._num_in_flight:
                    return None  # blocks grown by so far serve the next try
                victim = next(r for r in reversed(self.running) if r.replica == request.replica)
                if victim is request:
                    budgets[request.replica] = 0  # it stands still until earlier ones end
                    break
                self._preempt(victim, step)
            else:
                budgets[request.replica] -= self._add_row(step, request, count, budget)
        self._admit(step, budgets)
        for request, row in zip(step.requests, step.rows, strict=True):
            request.num_computed_tokens += len(row.token_ids)
            request.num_pending += row.sample
            request.num_in_flight += 1
        self._num_in_flight += bool(step.rows)
        return step

    def landed(self, step: Step) -> None:
        """The results of the oldest step in flight are there; `settle` each of its rows next."""
        self._num_in_flight -= 1
        for request, row in zip(step.requests, step.rows, strict=True):
            request.num_in_flight -= 1
            request.num_pending -= row.sample

    def settle(self, request: Request, row: Row, token_ids: Sequence[int]) -> None:
        """What a row sampled, cut where the request ends, becomes part of the request."""
        if row.num_drafts:  # those beyond the last right one are computed for nothing
            request.num_computed_tokens -= row.num_drafts - max(len(token_ids) - 1, 0)
        request.tokens += token_ids
        size = self.replicas[request.replica].block_size
        known = min(row.position + len(row.token_ids), len(request.tokens))
        if known // size > request.num_inserted_blocks >= 0:
            self.replicas[request.replica].cache.insert(request, known)

    def finish(self, request: Request) -> int | None:
        """End a request in whatever state; returns the slot to stop, where it is free now.

        While a step that holds a row of it is in flight its blocks are kept: `release` follows.
        """
        status, request.status = request.status, Status.FINISHED
        if status is Status.WAITING:
            self.waiting.remove(request)
        elif status is Status.RUNNING:
            self.running.remove(request)
            if not request.num_in_flight:
                return self.release(request)
        return None

    def release(self, request: Request) -> int:
        """Give back what a finished request holds; returns its slot."""
        assert not request.num_in_flight, "a launched step would write into blocks of others"
        slot = request.slot
        self.replicas[request.replica].release(request)
        return slot

    def take_dead_ends(self) -> list[Request]:
        """Requests to end, since no token may follow."""
        ended, self._dead_ends = self._dead_ends, []
        return ended

    def check_integrity(self) -> None:
        """AssertionError where requests, blocks and slots do not agree."""
        for replica in self.replicas:
            replica.check_integrity()
        for requests, status in ((self.running, Status.RUNNING), (self.waiting, Status.WAITING)):
            assert [r.order for r in requests] == sorted(r.order for r in requests)
            assert all(r.status is status for r in requests)
        assert all(not r.block_table and r.slot < 0 for r in self.waiting)

    def _num_lacking(self, request: Request) -> int:
        """Tokens that a running request could compute now."""
        if request.status is not Status.RUNNING:  # it was sent away in this very step
            return 0
        num_known, num_pending = len(request.tokens), request.num_pending
        if num_pending:
            num_output = num_known + num_pending - request.num_prompt_tokens
            if not request.run_ahead or num_output >= request.max_tokens:
                return 0
        return num_known + num_pending - request.num_computed_tokens

    def _add_row(self, step: Step, request: Request, count: int, budget: int) -> int:
        """Add a row of `count` tokens, and drafts where there is room; returns its tokens."""
        start, pending = request.num_computed_tokens, request.num_pending
        sample = start + count == len(request.tokens) + pending and not request.pooling
        tokens = [PENDING] if pending else request.tokens[start : start + count]
        masks, drafts = None, ()
        guide = request.guide if sample else None
        masks_follow = guide is not None and guide.follows and pending > 0
        if guide is not None and not masks_follow:
            left = request.max_tokens - request.num_output_tokens - pending - 1
            most = min(left, budget - count, self._max_row_tokens - count)
            shape = guide.shape(request.tokens, request.num_prompt_tokens, most)
            if shape is None:
                self._dead_ends.append(request)
                return 0
            drafts, masks = shape
            if drafts and not self.replicas[request.replica].grow(
                request, start + count + len(drafts)
            ):
                drafts, masks = (), None if masks is None else masks[:1]
        step.requests.append(request)
        step.rows.append(
            Row(
                slot=request.slot,
                token_ids=[*tokens, *drafts] if drafts else tokens,
                position=start,
                block_table=request.block_table,
                num_drafts=len(drafts),
                sample=sample,
                masks=masks,
                masks_follow=masks_follow,
            )
        )
        return count + len(drafts)

    def _admit(self, step: Step, budgets: list[int]) -> None:
        """Start waiting requests while slots, blocks and budget are there."""
        if not self.waiting or not any(self._open(budgets)):
            return
        for request in self._queue():
            leader = request.leader
            if leader is not None and not leader.has_prompt:
                continue
            place = self._place(request, budgets)
            if place is None:
                break
            replica, way = place
            self.waiting.remove(request)
            replica.admit(request, way)
            request.status = Status.RUNNING
            insort(self.running, request, key=_order)
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = request.num_computed_tokens
            if replica.cache.enabled and request.reuse:
                self.num_prefix_queries += len(request.tokens)
                self.num_prefix_hits += request.num_computed_tokens
            step.starts.append(request)
            budget = budgets[replica.index]
            count = min(self._num_lacking(request), budget, self._max_row_tokens)
            budgets[replica.index] -= self._add_row(step, request, count, budget)

    def _queue(self) -> list[Request]:
        """Waiting requests in the order of admission."""
        if not self._longest_first or len(self.waiting) < 2:
            return list(self.waiting)
        first = self.waiting[0]
        hits = {id(r): self._longest(r) for r in self.waiting[:_MOST_COMPARED]}
        queue = sorted(self.waiting, key=lambda r: (r.order[0], -hits.get(id(r), 0), r.order[1]))
        self._overtaken = self._overtaken + 1 if queue[0] is not first else 0
        return list(self.waiting) if self._overtaken > _MOST_OVERTAKEN else queue

    def _longest(self, request: Request) -> int:
        return max(len(self._way(replica, request)) for replica in self.replicas)

    @staticmethod
    def _way(replica: Replica, request: Request) -> list[Node]:
        return replica.cache.match(request.salt, request.tokens) if request.reuse else []

    def _place(self, request: Request, budgets: Sequence[int]) -> tuple[Replica, list[Node]] | None:
        """The replica with room that holds most of the prompt; of equal ones the emptiest."""
        best, best_key = None, None
        for replica in self._open(budgets):
            way = self._way(replica, request)
            if replica.can_admit(request, way):
                key = (-len(way), replica.num_running, replica.index)
                if best_key is None or key < best_key:
                    best, best_key = (replica, way), key
        return best

    def _in_the_way(self) -> Sequence[Request]:
        """Running requests of less priority than the first that waits, as few as give it room.

        Nobody where it has room, or where they would make way in vain.
        """
        if not self.waiting or not self.running:
            return ()
        first = next((r for r in self.waiting if not (r.leader and not r.leader.has_prompt)), None)
        if first is None or self.running[-1].order[0] <= first.order[0]:
            return ()
        found: list[Sequence[Request]] = []
        for replica in self.replicas:
            way = self._way(replica, first)
            lesser = [
                r
                for r in reversed(self.running)
                if r.replica == replica.index and r.order[0] > first.order[0]
            ]
            if replica.can_admit(first, way, lesser):
                count = next(
                    n for n in range(len(lesser) + 1) if replica.can_admit(first, way, lesser[:n])
                )
                found.append(lesser[:count])
        return min(found, key=len, default=())

    def _open(self, budgets: Sequence[int]) -> Iterator[Replica]:
        """Replicas that may take another request in this step."""
        return (r for r in self.replicas if budgets[r.index] and r.num_running < len(r.slots))

    def _preempt(self, request: Request, step: Step) -> None:
        """Send a running request back to the queue, its output so far kept."""
        self.running.remove(request)
        step.stops.append(self.release(request))
        request.status = Status.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)


def _order(request: Request) -> tuple[int, int]:
    return request.order
