"""The blocks of one replica's KV pool: who holds which, counted."""

from collections.abc import Callable, Iterable, Sequence


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Blocks 1 to num_blocks - 1; block 0 is the null block, which takes the writes of padding.

    A block is used (held by requests), cached (held by none, its content still in the prefix
    cache) or free. `reclaim` is called with the number of blocks that lack, while others are
    cached; it must `forget` at least one of them.
    """

    def __init__(self, num_blocks: int):
        if num_blocks < 2:
            raise ValueError(f"num_blocks={num_blocks} must be at least 2: block 0 is never used")
        self.num_blocks = num_blocks
        self.reclaim: Callable[[int], None] | None = None
        self._holders = [0] * num_blocks
        self._in_cache = bytearray(num_blocks)
        self._free = list(range(num_blocks - 1, 0, -1))  # a stack: low ids first
        self._num_cached = 0

    @property
    def num_total(self) -> int:
        """Blocks that can be allocated at all."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that no request holds and whose content may be used again."""
        return self._num_cached

    @property
    def num_used(self) -> int:
        """Blocks that requests hold."""
        return self.num_total - self.num_free - self.num_cached

    def can_allocate(self, count: int) -> bool:
        """Whether `count` blocks can be had, cached ones given up where needed."""
        return count <= len(self._free) + self._num_cached

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each held once. RuntimeError where there are not as many."""
        while len(self._free) < count:
            before = len(self._free)
            if self.reclaim is not None and self._num_cached:
                self.reclaim(count - before)
            if len(self._free) == before:
                raise RuntimeError(
                    f"{count} blocks are wanted, {before} are free and none can be reclaimed"
                )
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks that others hold, or that are cached, once more."""
        for block in blocks:
            self._check(block)
            if not self._holders[block]:
                if not self._in_cache[block]:
                    raise RuntimeError(f"block {block} is free: nobody can share it")
                self._num_cached -= 1
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> list[int]:
        """Let go of blocks; returns those that are only cached from now on."""
        idle = []
        for block in blocks:
            self._check(block)
            if not self._holders[block]:
                raise RuntimeError(f"block {block} is freed twice")
            self._holders[block] -= 1
            if not self._holders[block]:
                if self._in_cache[block]:
                    self._num_cached += 1
                    idle.append(block)
                else:
                    self._free.append(block)
        return idle

    def remember(self, block: int) -> None:
        """The prefix cache holds this block's content from now on; some request holds it too."""
        self._check(block)
        if not self._holders[block] or self._in_cache[block]:
            raise RuntimeError(f"block {block} is free or cached already")
        self._in_cache[block] = 1

    def forget(self, block: int) -> None:
        """The prefix cache gives this block's content up."""
        self._check(block)
        if not self._in_cache[block]:
            raise RuntimeError(f"block {block} is not cached")
        self._in_cache[block] = 0
        if not self._holders[block]:
            self._num_cached -= 1
            self._free.append(block)

    def num_holders(self, block: int) -> int:
        """Requests that hold the block."""
        self._check(block)
        return self._holders[block]

    def states(self) -> tuple[Sequence[int], bytes]:
        """(holders of each block, 1 for each that the prefix cache knows), a copy."""
        return list(self._holders), bytes(self._in_cache)

    def check_integrity(self) -> None:
        """AssertionError where a block is lost, doubled or counted wrongly."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert 0 not in free and not self._holders[0] and not self._in_cache[0], "null block in use"
        cached = {b for b in range(1, self.num_blocks) if self._in_cache[b]}
        used = {b for b in range(1, self.num_blocks) if self._holders[b]}
        assert not free & (cached | used), "a free block is held"
        idle = cached - used
        assert len(idle) == self._num_cached, f"{len(idle)} cached, counted {self._num_cached}"
        assert len(free) + len(idle) + len(used) == self.num_total, "a block is lost"

    def _check(self, block: int) -> None:
        if not 0 < block < self.num_blocks:
            raise IndexError(f"block {block} is not within 1 to {self.num_blocks - 1}")
