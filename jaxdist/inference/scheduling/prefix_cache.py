"""Which blocks hold the keys and values of which text: a radix tree over full blocks.

A node stands for one block; the way from its root, one for each salt, spells all the tokens up to
and including the block's. A request holds each block on its way, so blocks without a holder lie
below those with one. Their order of being left (deepest first, all blocks of a request at once)
has every node behind those below it: its first is always a leaf, the one unused for longest.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import islice

from jaxdist.inference.scheduling.block_pool import BlockPool
from jaxdist.inference.scheduling.request import Request


class Node:
    """One block in the tree; a root has none."""

    __slots__ = ("block", "children", "key", "parent")

    def __init__(self, parent: "Node | None", key: Hashable, block: int):
        self.parent, self.key, self.block = parent, key, block
        self.children: dict[Hashable, Node] = {}


class PrefixCache:
    """The tree of one replica; it keeps `pool` told of what it holds.

    enabled: False finds and keeps nothing.
    """

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True):
        self.enabled, self.block_size = enabled, block_size
        self._pool = pool
        self._roots: dict[Hashable, Node] = {}
        self._nodes: dict[int, Node] = {}  # by block
        self._idle: dict[int, None] = {}  # blocks without a holder, left longest ago first
        pool.reclaim = self.evict

    def __len__(self) -> int:
        return len(self._nodes)

    def match(self, salt: Hashable, tokens: Sequence[int]) -> list[Node]:
        """Nodes of the longest cached beginning; never all of the tokens, the last is computed."""
        node = self._roots.get(salt) if self.enabled else None
        if node is None:
            return []
        size, way = self.block_size, []
        for start in range(0, len(tokens) - size, size):
            node = node.children.get(tuple(tokens[start : start + size]))
            if node is None:
                break
            way.append(node)
        return way

    def take(self, request: Request, way: Sequence[Node]) -> None:
        """`request`, which holds no block yet, shares those of `way`."""
        blocks = [node.block for node in way]
        self._pool.share(blocks)
        for block in blocks:
            self._idle.pop(block, None)
        request.block_table = blocks
        request.num_inserted_blocks = len(blocks)
        request.node = way[-1] if way else None

    def insert(self, request: Request, num_tokens: int) -> None:
        """Keep the full blocks of the first `num_tokens` tokens, which are computed.

        Stops for good where the tree has an equal block of another request: what `request` holds
        must be its way.
        """
        done = request.num_inserted_blocks
        if not self.enabled or done < 0:
            return
        size = self.block_size
        for i in range(done, num_tokens // size):
            node = request.node or self._root(request.salt)
            key = tuple(request.tokens[i * size : (i + 1) * size])
            if key in node.children:
                request.num_inserted_blocks = -1
                return
            request.node = self._add(node, key, request.block_table[i])
            request.num_inserted_blocks = i + 1

    def release(self, request: Request, num_tokens: int) -> None:
        """`request` lets go of its blocks; those of the first `num_tokens` tokens stay cached."""
        held = request.block_table
        self.insert(request, num_tokens)
        if request.num_inserted_blocks < 0:
            # Its way is spelled by blocks of others: hold those too, so that all are left in turn.
            size, node = self.block_size, self._root(request.salt)
            for i in range(num_tokens // size):
                key = tuple(request.tokens[i * size : (i + 1) * size])
                child = node.children.get(key)
                if child is None:
                    child = self._add(node, key, held[i])
                elif child.block != held[i]:
                    self._pool.share([child.block])
                    self._idle.pop(child.block, None)
                    self._leave([held[i]])
                    held[i] = child.block
                node = child
        self._leave(reversed(held))
        request.block_table, request.node, request.num_inserted_blocks = [], None, 0

    def evict(self, count: int) -> None:
        """Give up the `count` blocks without a holder that were left longest ago, or all."""
        for block in list(islice(self._idle, count)):
            del self._idle[block]
            self._remove(self._nodes[block])

    def clear(self) -> None:
        """Give up all blocks without a holder."""
        self.evict(len(self._idle))

    def check_integrity(self) -> None:
        """AssertionError where tree, pool and order of eviction do not agree."""
        seen: dict[int, Node] = {}
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            for key, child in node.children.items():
                assert child.parent is node and child.key == key, "a node hangs wrongly"
                assert child.block not in seen, f"block {child.block} stands twice in the tree"
                if node.parent is not None and self._pool.num_holders(child.block):
                    assert self._pool.num_holders(node.block), "held below a block that is not"
                seen[child.block] = child
                stack.append(child)
        assert seen == self._nodes, "a node is lost"
        idle = {block for block in seen if not self._pool.num_holders(block)}
        assert idle == set(self._idle), "the order of eviction misses a block"
        assert len(idle) == self._pool.num_cached, "pool and tree count differently"
        gone: set[int] = set()
        for block in self._idle:
            below = {child.block for child in self._nodes[block].children.values()}
            assert below <= gone, "a block would be evicted before one below it"
            gone.add(block)

    def _root(self, salt: Hashable) -> Node:
        return self._roots.setdefault(salt, Node(None, salt, 0))

    def _add(self, parent: Node, key: Hashable, block: int) -> Node:
        node = parent.children[key] = self._nodes[block] = Node(parent, key, block)
        self._pool.remember(block)
        return node

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.children
        del parent.children[node.key], self._nodes[node.block]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.key)
        self._pool.forget(node.block)

    def _leave(self, blocks: Iterable[int]) -> None:
        for block in self._pool.free(blocks):
            self._idle[block] = None
