"""Checksums of arrays, by which a restore proves that it has read what was saved.

A file of array data may change a bit and be read without a word: the compression in it has no
check of its own. A checksum is a function of the values and their places alone, so it is the same
for every mesh and sharding, and no array is gathered for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax


def checksums(named: Mapping[str, Array]) -> dict[str, int]:
    """The checksum of each array; all processes ask for the same ones, in the same order."""
    # All are dispatched before the first is waited for.
    sums = {name: _checksum(array) for name, array in named.items()}
    return {name: int(value) for name, value in sums.items()}


@jax.jit
def _checksum(array: Array) -> Array:
    """Sum of the array's words, each times an odd number of its place, modulo 2^32.

    An odd factor loses no bit, so one wrong word always shows; factors that look random let
    several wrong ones cancel with odds of 2^-32. [...] -> [] uint32
    """
    words = _words(array)
    place = jnp.zeros(words.shape, jnp.uint32)
    for dim, size in enumerate(words.shape):
        place = place * jnp.uint32(size % 2**32) + lax.broadcasted_iota(
            jnp.uint32, words.shape, dim
        )
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
