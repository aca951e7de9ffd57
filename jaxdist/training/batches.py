"""From the loader's rows on the host to a global batch on the mesh.

A process materialises only the rows that its own devices hold.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.data.loader import Loader
from jaxdist.training.step import Batch

BATCH_SPEC = P(None, "dp")  # [microbatches, rows, tokens]


def batch_maker(
    loader: Loader, mesh: Mesh, num_microbatches: int, rows: int, length: int
) -> Callable[[int], Batch]:
    """`step -> Batch`, [M, rows / M, length], of this process's part of the global batch.

    Row r of the loader's global batch is row r % (rows / M) of microbatch r // (rows / M).
    """
    shape = (num_microbatches, rows // num_microbatches, length)
    sharding = NamedSharding(mesh, BATCH_SPEC)
    held = [
        index[1].indices(shape[1])
        for index in sharding.addressable_devices_indices_map(shape).values()
        if index is not None
    ]
    first, last = min(start for start, _, _ in held), max(stop for _, stop, _ in held)

    def make(step: int) -> Batch:
        starts = range(0, rows, shape[1])
        parts = [loader.rows(step, start + first, start + last) for start in starts]

        def place(name: str) -> jax.Array:
            local = np.stack([getattr(part, name) for part in parts])

            def shard(index: Any) -> np.ndarray:
                start, stop, _ = index[1].indices(shape[1])
                return local[:, start - first : stop - first]

            return jax.make_array_from_callback(shape, sharding, shard)

        fields = ("tokens", "labels", "loss_mask", "segment_ids", "positions")
        return Batch(**{name: place(name) for name in fields})

    return make


def abstract_batch(mesh: Mesh, num_microbatches: int, rows: int, length: int) -> Batch:
    """A batch's shapes and shardings, to compile a step before there is data."""
    shape = (num_microbatches, rows // num_microbatches, length)
    leaf: Any = jax.ShapeDtypeStruct(shape, np.int32, sharding=NamedSharding(mesh, BATCH_SPEC))
    return Batch(tokens=leaf, labels=leaf, loss_mask=leaf, segment_ids=leaf, positions=leaf)
