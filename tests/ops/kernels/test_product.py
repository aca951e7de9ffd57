"""The kernel for products equals what XLA makes of the plain function."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.ops import kernels
from jaxdist.ops.linear import LANES, block_by_block, in_blocks

if not kernels.available():
    pytest.skip(
        "no numba, or no AVX2: XLA's twins run, and are tested, instead", allow_module_level=True
    )

from jaxdist.ops.kernels import product


@pytest.mark.parametrize("lanes", [8, 16])  # of processors with 256 and with 512 bits
@pytest.mark.parametrize(
    ("x_dtype", "w_dtype"),
    [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")],
)
def test_equals_its_twin(x_dtype, w_dtype, lanes, monkeypatch):
    """In a loop over the layers too, as a model calls it."""
    monkeypatch.setattr(product, "vector_size", lambda: lanes)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(13, 96)), x_dtype)
    stack = in_blocks(jnp.asarray(rng.normal(size=(5, 96, 2 * LANES)), w_dtype))

    def sums(multiplied):
        def layer(number, sum_RN):
            return sum_RN + multiplied(x, stack, number)

        return jax.jit(lambda: lax.fori_loop(0, 5, layer, jnp.zeros((13, 2 * LANES))))()

    np.testing.assert_allclose(sums(product.multiply), sums(block_by_block), rtol=1e-5, atol=1e-4)


def test_processors_without_bf16_widen(monkeypatch):
    monkeypatch.setattr(product, "features", lambda: frozenset({"avx2", "fma"}))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(3, 32)), jnp.bfloat16)
    stack = in_blocks(jnp.asarray(rng.normal(size=(1, 32, LANES)), jnp.bfloat16))
    found = jax.jit(product.multiply)(x, stack, 0)
    np.testing.assert_array_equal(found, product.multiply(x.astype(jnp.float32), stack, 0))
