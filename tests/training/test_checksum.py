"""A checksum: of the values and their places, whatever the sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.training.checksum import checksums

MASK = 2**32 - 1


def checksum(array) -> int:
    return checksums({"a": jnp.asarray(array)})["a"]


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & MASK
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & MASK
    return x ^ (x >> 16)


DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0, 4)])
def test_equals_the_sum_word_by_word(dtype, shape):
    values = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 100, shape)
    array = jnp.asarray(values).astype(dtype)
    bits = np.asarray(array)
    bits = bits.view(f"u{bits.dtype.itemsize}").ravel().tolist()
    want = sum(word * (mixed(i) | 1) for i, word in enumerate(bits)) & MASK
    assert checksum(array) == want


@pytest.mark.parametrize(
    "spec",
    [
        PartitionSpec("dp", "tp"),
        PartitionSpec(("tp", "pp"), "dp"),
        PartitionSpec(None, "pp"),
        PartitionSpec(),
    ],
)
def test_is_the_same_in_every_sharding_and_gathers_nothing(spec):
    mesh = jax.make_mesh(
        (2, 2, 2), ("dp", "pp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    whole = jax.random.normal(jax.random.key(0), (8, 16))
    assert checksum(jax.device_put(whole, NamedSharding(mesh, spec))) == checksum(whole)


def test_one_bit_anywhere_shows_and_so_do_values_that_change_places():
    array = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    known = checksum(array)
    for i in range(array.size):
        for bit in (0, 13, 31):
            words = array.view(np.uint32).copy()
            words.flat[i] ^= np.uint32(1) << np.uint32(bit)
            assert checksum(words.view(np.float32)) != known
    assert checksum(array[::-1]) != known and checksum(array[:, ::-1]) != known
    half = array.copy()
    half[:2] = 0
    assert checksum(half) != known
