"""Block pool and prefix tree under random use: nothing is lost, doubled, or found wrongly."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.block_pool import BlockPool, blocks_for
from jaxdist.inference.scheduling.prefix_cache import PrefixCache
from jaxdist.inference.scheduling.request import Request

SIZE = 2
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=13)
PARAMS = SamplingParams()


class Replicas(RuleBasedStateMachine):
    """Requests come, grow and go in a small pool; `content` is what each block really holds."""

    @initialize(num_blocks=st.integers(2, 20), enabled=st.booleans())
    def make(self, num_blocks, enabled):
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, SIZE, enabled=enabled)
        self.requests: list[Request] = []
        self.content: dict[int, tuple] = {}

    @rule(text=TEXTS, salt=st.sampled_from([None, "a"]))
    def admit(self, text, salt):
        request = Request(
            request_id="r", prompt_ids=text, params=PARAMS, max_tokens=1, order=(0, 0), salt=salt
        )
        way = self.cache.match(salt, text)
        assert len(way) * SIZE < len(text), "a hit covers the whole prompt"
        for i, node in enumerate(way):
            assert self.content[node.block] == (salt, *text[: (i + 1) * SIZE])
        idle = sum(not self.pool.num_holders(node.block) for node in way)
        lacking = blocks_for(len(text), SIZE) - len(way)
        if not self.pool.can_allocate(lacking + idle):
            return
        self.cache.take(request, way)
        request.block_table += self.pool.allocate(lacking)
        self._write(request)
        self.requests.append(request)

    @rule(data=st.data(), more=TEXTS, tell=st.booleans())
    def grow(self, data, more, tell):
        if not self.requests:
            return
        request = data.draw(st.sampled_from(self.requests))
        request.tokens += more
        lacking = blocks_for(len(request.tokens), SIZE) - len(request.block_table)
        if not self.pool.can_allocate(lacking):
            del request.tokens[-len(more) :]
            return
        request.block_table += self.pool.allocate(lacking)
        self._write(request)
        if tell:
            self.cache.insert(request, len(request.tokens))

    @rule(data=st.data())
    def release(self, data):
        if self.requests:
            index = data.draw(st.integers(0, len(self.requests) - 1))
            request = self.requests.pop(index)
            self.cache.release(request, len(request.tokens))
            assert not request.block_table

    @rule(count=st.integers(0, 5))
    def evict(self, count):
        self.cache.evict(count)

    @rule()
    def clear(self):
        self.cache.clear()
        assert self.pool.num_cached == 0

    @invariant()
    def all_adds_up(self):
        if hasattr(self, "pool"):
            self.pool.check_integrity()
            self.cache.check_integrity()
            held = {block for request in self.requests for block in request.block_table}
            assert len(held) == self.pool.num_used

    def _write(self, request: Request) -> None:
        for i, block in enumerate(request.block_table):
            text = (request.salt, *request.tokens[: (i + 1) * SIZE])
            if len(request.tokens) >= (i + 1) * SIZE:
                if self.pool.num_holders(block) > 1:
                    assert self.content[block] == text, "a shared block is written to"
                self.content[block] = text


TestReplicas = Replicas.TestCase
TestReplicas.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_what_cannot_be_is_an_error():
    pool = BlockPool(3)
    with pytest.raises(ValueError, match="num_blocks=1 must be at least 2"):
        BlockPool(1)
    first, second = pool.allocate(2)
    assert not pool.can_allocate(1)
    with pytest.raises(RuntimeError, match="1 blocks are wanted, 0 are free"):
        pool.allocate(1)
    pool.free([first])
    with pytest.raises(RuntimeError, match=f"block {first} is freed twice"):
        pool.free([first])
    with pytest.raises(RuntimeError, match=f"block {first} is free: nobody can share it"):
        pool.share([first])
    for block in (0, -1, 3):
        with pytest.raises(IndexError, match=f"block {block} is not within 1 to 2"):
            pool.free([block])
    pool.remember(second)
    with pytest.raises(RuntimeError, match="free or cached already"):
        pool.remember(second)
    assert pool.states() == ([0, 0, 1], b"\0\0\1")


def test_the_leaf_unused_for_longest_is_given_up_first():
    pool = BlockPool(7)
    cache = PrefixCache(pool, SIZE)

    def run(*text):
        request = Request(
            request_id="r", prompt_ids=text, params=PARAMS, max_tokens=1, order=(0, 0)
        )
        way = cache.match(None, text)
        cache.take(request, way)
        request.block_table += pool.allocate(blocks_for(len(text), SIZE) - len(way))
        cache.release(request, len(text))
        return len(way)

    run(0, 0, 1, 1)
    run(0, 0, 2, 2)
    assert run(0, 0, 1, 1, 9) == 2
    cache.evict(1)  # of [0 0 2 2] the end, since [0 0] is used by the newer one
    assert run(0, 0, 2, 2, 9) == 1
    assert run(0, 0, 1, 1, 9) == 2
