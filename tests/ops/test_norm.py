"""Norms against numpy in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.norm import layer_norm, rms_norm

RANDOM = np.random.default_rng(0)
X, GAIN, BIAS = RANDOM.normal(3, 5, (4, 6, 16)), RANDOM.normal(size=16), RANDOM.normal(size=16)


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * GAIN


def layer(x, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * GAIN + bias


@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-8)])
def test_equals_numpy(dtype, tolerance):
    x, gain, bias = jnp.asarray(X, dtype), jnp.asarray(GAIN), jnp.asarray(BIAS)
    exact = np.asarray(x, np.float64)
    for got, want in (
        (rms_norm(x, gain, 1e-5), rms(exact)),
        (layer_norm(x, gain, bias, 1e-5), layer(exact, BIAS)),
        (layer_norm(x, gain, None, 1e-5), layer(exact, 0)),
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            np.asarray(got, np.float64), want, rtol=tolerance, atol=4 * tolerance
        )


def test_statistics_of_half_precision_do_not_overflow():
    x = jnp.full((2, 16), 300.0, jnp.float16)  # its square is beyond fp16
    np.testing.assert_allclose(rms_norm(x, jnp.ones(16), 1e-5), 1, rtol=1e-3)
