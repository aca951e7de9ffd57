"""Checksums of arrays, by which a restore proves that it has read what was saved.

A file of array data may change a bit and be read without a word: the compression in it has no
check of its own. A checksum is a function of the values and their places alone, so it is the same
for every mesh and sharding, and no array is gathered for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils


def checksums(named: Mapping[str, Array]) -> dict[str, int]:
    """The checksum of each array; all processes ask for the same ones, in the same order.

    Each device sums up its own shard. Over them the host adds: programs with collectives that run
    beside one another would wait for one another for ever.
    """
    # All are dispatched before the first is waited for.
    parts = [list(_of_shards(array)) for array in named.values()]
    sums = np.array([sum(map(int, own)) % 2**32 for own in parts], np.uint32)
    if jax.process_count() > 1:
        sums = multihost_utils.process_allgather(sums).sum(axis=0, dtype=np.uint32)
    return {name: int(value) for name, value in zip(named, sums, strict=True)}


def _of_shards(array: Array) -> Iterator[Array]:
    """What this process adds to an array's checksum: each shard once, wherever it has copies."""
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            first = [
                part.indices(size)[0] for part, size in zip(shard.index, array.shape, strict=True)
            ]
            yield _checksum(shard.data, np.array(first, np.uint32), array.shape)


@partial(jax.jit, static_argnums=2)
def _checksum(shard: Array, first: Array, shape: tuple[int, ...]) -> Array:
    """Sum of a shard's words, each times an odd number of its place, modulo 2^32.

    first: The shard's first place in an array of this shape, [number of dims].
    An odd factor loses no bit, so one wrong word always shows; factors that look random let
    several wrong ones cancel with odds of 2^-32. [...] -> [] uint32
    """
    words = _words(shard)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate((*shape, *words.shape[len(shape) :])):
        own = lax.broadcasted_iota(jnp.uint32, words.shape, dim)
        if dim < len(shape):
            own = own + first[dim]
        place = place * jnp.uint32(size % 2**32) + own
    return jnp.sum(words * (_mixed(place) | jnp.uint32(1)), dtype=jnp.uint32)


def _words(array: Array) -> Array:
    """The bits of each value as uint32; of wider ones as several, in a dimension of their own."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    narrow: dict[int, Any] = {1: jnp.uint8, 2: jnp.uint16}
    kind = narrow.get(array.dtype.itemsize, jnp.uint32)
    return lax.bitcast_convert_type(array, kind).astype(jnp.uint32)


def _mixed(x: Array) -> Array:
    """A hash of 32-bit words: the finalizer of MurmurHash3 (Appleby, public domain)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
