"""A weight in blocks multiplies as a plain one does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.ops import kernels, product
from jaxdist.ops import linear as module
from jaxdist.ops.linear import LANES, Blocks, fits_blocks, in_blocks, linear

BY_KERNELS = [True] * kernels.available() + [False]  # or as XLA does it


@pytest.mark.parametrize("by_kernels", BY_KERNELS)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 256, 257])
def test_blocks_equal_the_plain_weight(rows, dtype, native, by_kernels, monkeypatch):
    monkeypatch.setattr(module, "DEPTH", 10)  # a block in three parts
    monkeypatch.setattr(product, "cpu_multiplies_bf16", lambda: native)
    monkeypatch.setattr(kernels, "available", lambda: by_kernels)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 1, 24)), dtype)
    stack = jnp.asarray(rng.normal(size=(3, 24, 3 * LANES)), dtype)
    expected = x.astype(jnp.float32) @ stack[1].astype(jnp.float32)
    for weight in (stack[1], Blocks(in_blocks(stack), 1)):
        found = linear(x, weight, dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_kernels", BY_KERNELS)
@pytest.mark.parametrize("depth", [96, 576, 1536])
@pytest.mark.parametrize(
    ("dtype", "native"),
    [(jnp.bfloat16, False), (jnp.float32, False)]
    + [(jnp.bfloat16, True)] * product.cpu_multiplies_bf16(),
)
def test_a_row_is_the_same_among_any_number_of_rows(dtype, native, depth, by_kernels, monkeypatch):
    """Bit by bit: else a prompt whose beginning is cached would be another one in 16 bits."""
    monkeypatch.setattr(product, "cpu_multiplies_bf16", lambda: native)
    monkeypatch.setattr(kernels, "available", lambda: by_kernels)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(320, depth)), dtype)
    weight = Blocks(in_blocks(jnp.asarray(rng.normal(size=(1, depth, 2 * LANES)), dtype)), 0)
    found = np.asarray(linear(x, weight, dtype))
    for rows in (1, 2, 3, 4, 5, 16, 32, 65, 128, 129, 256)[0 if by_kernels else 1 :]:
        np.testing.assert_array_equal(linear(x[:rows], weight, dtype), found[:rows])


@pytest.mark.skipif(
    not kernels.available(), reason="no numba, or no AVX2: XLA's twins run, and are tested, instead"
)
def test_blocks_are_multiplied_where_they_lie():
    """Nothing as large as a layer is made in memory, though a loop chooses it."""
    rng = np.random.default_rng(0)
    stack = in_blocks(jnp.asarray(rng.normal(size=(3, 256, 4 * LANES)), jnp.bfloat16))

    def sums(x, stack):
        def layer(number, sum_RN):
            return sum_RN + linear(x, Blocks(stack, number), jnp.bfloat16)

        return lax.fori_loop(0, 3, layer, jnp.zeros((2, 4 * LANES)))

    compiled = jax.jit(sums).lower(jnp.ones((2, 256), jnp.bfloat16), stack).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < stack[0].nbytes / 4


def test_blocks_are_for_the_cpu():
    assert fits_blocks(8, 128, jnp.bfloat16, "cpu") and fits_blocks(576, 128, jnp.float32, "cpu")
    assert not fits_blocks(8, 100, jnp.bfloat16, "cpu")
    assert not fits_blocks(257, 128, jnp.float32, "cpu")  # no parts but single rows
    assert not fits_blocks(7, 128, jnp.bfloat16, "cpu")  # no pairs
    assert not fits_blocks(8, 128, jnp.bfloat16, "gpu")
