"""Weights on a CPU, moved into pages of 2 MiB.

A step reads all of them, and in pages of 4 KiB the processor looks for a new address, and begins
to read ahead anew, every few nanoseconds. Many systems give large pages only to who asks.
"""

import ctypes
from collections.abc import Iterator
from typing import Any

import jax

HUGE_PAGE = 2**21  # bytes, on x86-64 and on ARM with pages of 4 KiB
# Advice to Linux, from mman.h: may be in huge pages; is to be moved into them now (Linux 6.1).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def into_huge_pages(arrays: Any) -> int:
    """Move what lies in memory of this process into huge pages, where the system lets us.

    Args:
        arrays: A tree of arrays on CPU devices. Their values stay, and so do their addresses.

    Returns:
        How many bytes are in huge pages now: 0 where the system is not Linux, or has none to give.
    """
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # Windows
        return 0
    moved = 0
    for address, num_bytes in _areas(arrays):
        area = ctypes.c_void_p(address), ctypes.c_size_t(num_bytes)
        if not any(madvise(*area, advice) for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE)):
            moved += num_bytes
    return moved


def _areas(arrays: Any) -> Iterator[tuple[int, int]]:
    """Address and bytes of the whole huge pages within each shard."""
    for array in jax.tree.leaves(arrays):
        for shard in array.addressable_shards:
            first = shard.data.unsafe_buffer_pointer()
            start = -(-first // HUGE_PAGE) * HUGE_PAGE
            end = (first + shard.data.nbytes) // HUGE_PAGE * HUGE_PAGE
            if start < end:
                yield start, end - start
