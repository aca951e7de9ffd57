"""A weight in blocks multiplies as a plain one does."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import linear as module
from jaxdist.ops.linear import FEW, LANES, fits_blocks, in_blocks, linear


@pytest.mark.parametrize("rows", [1, 3, FEW + 1])
def test_blocks_equal_the_plain_weight(rows, monkeypatch):
    monkeypatch.setattr(module, "DEPTH", 10)  # a block in three parts
    rng = np.random.default_rng(0)
    x, w = (
        jnp.asarray(rng.normal(size=size), jnp.bfloat16)
        for size in ((rows, 1, 24), (24, 2 * LANES))
    )
    expected = x.astype(jnp.float32) @ w.astype(jnp.float32)
    for weight in (w, in_blocks(w, as_bits=False), in_blocks(w, as_bits=True)):
        found = linear(x, weight, jnp.bfloat16)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_blocks_are_for_16_bits_on_the_cpu():
    assert fits_blocks(128, jnp.bfloat16, "cpu")
    assert not fits_blocks(100, jnp.bfloat16, "cpu")
    assert not fits_blocks(128, jnp.float32, "cpu")
    assert not fits_blocks(128, jnp.bfloat16, "gpu")
