"""One dp replica's share of what requests need: blocks, their cache, and slots."""

from collections import Counter
from collections.abc import Sequence

from jaxdist.inference.scheduling.block_pool import BlockPool, blocks_for
from jaxdist.inference.scheduling.prefix_cache import Node, PrefixCache
from jaxdist.inference.scheduling.request import Request


class Replica:
    """Blocks and slots of one replica; `slots` are its share of the runner's."""

    def __init__(
        self, index: int, *, num_blocks: int, block_size: int, slots: range, enable_caching: bool
    ):
        self.index, self.block_size, self.slots = index, block_size, slots
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size, enabled=enable_caching)
        self._free_slots = list(reversed(slots))

    @property
    def num_running(self) -> int:
        """Slots that are taken."""
        return len(self.slots) - len(self._free_slots)

    def can_admit(
        self, request: Request, way: Sequence[Node], without: Sequence[Request] = ()
    ) -> bool:
        """Whether a slot and blocks for all known tokens are there, `way` being cached.

        Each running request is left one block to grow by, so that who enters is not at once sent
        away again. without: Running requests, taken as released.
        """
        if not self._free_slots and not without:
            return False
        let_go = Counter(block for other in without for block in other.block_table)
        freed = sum(self.pool.num_holders(block) == count for block, count in let_go.items())
        idle = sum(self.pool.num_holders(node.block) == let_go[node.block] for node in way)
        spare = self.num_running - len(without)
        lacking = blocks_for(len(request.tokens), self.block_size) - len(way)
        return self.pool.can_allocate(lacking + idle + spare - freed)

    def admit(self, request: Request, way: Sequence[Node]) -> None:
        """Give `request` a slot and its blocks; the tokens of `way` count as computed."""
        self.cache.take(request, way)
        request.replica, request.slot = self.index, self._free_slots.pop()
        request.num_computed_tokens = len(way) * self.block_size
        self.grow(request, len(request.tokens))

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens; False, and nothing done, where blocks lack."""
        if num_tokens <= len(request.block_table) * self.block_size:
            return True
        lacking = blocks_for(num_tokens, self.block_size) - len(request.block_table)
        if not self.pool.can_allocate(lacking):
            return False
        request.block_table += self.pool.allocate(lacking)
        return True

    def release(self, request: Request) -> None:
        """Take slot and blocks back; what is computed stays cached."""
        num_computed = min(request.num_computed_tokens, len(request.tokens))
        self.cache.release(request, num_computed)
        self._free_slots.append(request.slot)
        request.replica = request.slot = -1
        request.num_computed_tokens = 0

    def check_integrity(self) -> None:
        """AssertionError where pool, cache or slots do not add up."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        assert len(set(self._free_slots)) == len(self._free_slots), "a slot is free twice"
        assert set(self._free_slots) <= set(self.slots), "a slot of another replica"
