"""Weights moved into huge pages: the same values at the same place, and the kernel agrees."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.inference.weights.huge_pages import HUGE_PAGE, into_huge_pages


def in_huge_pages() -> int:
    """Bytes of this process that the kernel holds in huge pages."""
    found = re.search(r"AnonHugePages: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    assert found
    return int(found[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
def test_large_arrays_are_moved_and_stay_what_they_are() -> None:
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2])
    whole = np.arange(8 * HUGE_PAGE // 4, dtype=np.float32)
    large = jax.device_put(whole, NamedSharding(mesh, P("tp")))
    small = jnp.arange(10)
    before = [shard.data.unsafe_buffer_pointer() for shard in large.addressable_shards]
    moved = into_huge_pages({"large": large, "small": small})
    assert moved in range(0, whole.nbytes + 1, HUGE_PAGE)
    assert in_huge_pages() >= moved
    assert [shard.data.unsafe_buffer_pointer() for shard in large.addressable_shards] == before
    np.testing.assert_array_equal(large, whole)
    np.testing.assert_array_equal(small, np.arange(10))


def test_nothing_to_move() -> None:
    assert into_huge_pages([jnp.zeros(3), jnp.zeros(())]) == 0
