"""A weight in blocks multiplies as a plain one does."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import linear as module
from jaxdist.ops import product
from jaxdist.ops.linear import FEW, LANES, Blocks, fits_blocks, in_blocks, linear


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [1, 3, FEW + 1])
def test_blocks_equal_the_plain_weight(rows, native, dtype, monkeypatch):
    monkeypatch.setattr(module, "DEPTH", 10)  # a block in three parts
    monkeypatch.setattr(product, "cpu_multiplies_bf16", lambda: native)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, 1, 24)), dtype)
    stack = jnp.asarray(rng.normal(size=(3, 24, 2 * LANES)), dtype)
    expected = x.astype(jnp.float32) @ stack[1].astype(jnp.float32)
    for weight in (stack[1], Blocks(in_blocks(stack), 1)):
        found = linear(x, weight, dtype)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("depth", [96, 576, 1536])
@pytest.mark.parametrize(
    ("dtype", "native"),
    [(jnp.bfloat16, False), (jnp.float32, False)]
    + [(jnp.bfloat16, True)] * product.cpu_multiplies_bf16(),
)
def test_a_row_is_the_same_among_any_number_of_rows(dtype, native, depth, monkeypatch):
    """Bit by bit: else a prompt whose beginning is cached would be another one in 16 bits."""
    monkeypatch.setattr(product, "cpu_multiplies_bf16", lambda: native)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(320, depth)), dtype)
    stack = jnp.asarray(rng.normal(size=(1, depth, 2 * LANES)), dtype)
    weight = Blocks(in_blocks(stack), 0)
    found = np.asarray(linear(x, weight, dtype))
    for rows in (2, 3, 16, 32, FEW, FEW + 1, 256):
        np.testing.assert_array_equal(linear(x[:rows], weight, dtype), found[:rows])


def test_blocks_are_for_the_cpu():
    assert fits_blocks(8, 128, jnp.bfloat16, "cpu") and fits_blocks(576, 128, jnp.float32, "cpu")
    assert not fits_blocks(8, 100, jnp.bfloat16, "cpu")
    assert not fits_blocks(257, 128, jnp.bfloat16, "cpu")  # no parts but single rows
    assert not fits_blocks(8, 128, jnp.bfloat16, "gpu")
