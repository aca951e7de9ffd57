"""Gated activations with their own backward equal autodiff of their definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.activations import geglu, gelu, swiglu

PLAIN = {
    swiglu: lambda gate, up: jax.nn.silu(gate) * up,
    geglu: lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
}


def inputs(dtype, scale=3.0):
    gate, up = scale * np.random.default_rng(0).normal(size=(2, 4, 5, 16))
    return jnp.asarray(gate, dtype), jnp.asarray(up, dtype)


def value_and_gradients(function, *args):
    weight = jnp.cos(jnp.arange(args[0].size, dtype=jnp.float32)).reshape(args[0].shape)
    total = lambda *args: (function(*args).astype(jnp.float32) * weight).sum()  # noqa: E731
    return function(*args), *jax.grad(total, range(len(args)))(*args)


@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7)])
def test_equals_autodiff(function, dtype, tolerance):
    args = inputs(dtype)
    exact = [a.astype(jnp.float32) for a in args]
    for got, want in zip(
        value_and_gradients(function, *args),
        value_and_gradients(PLAIN[function], *exact),
        strict=True,
    ):
        assert got.dtype == dtype
        np.testing.assert_allclose(
            got.astype(jnp.float32), want, rtol=tolerance, atol=tolerance * np.abs(want).max()
        )


def test_gelu_is_the_tanh_approximation():
    gate, _ = inputs(jnp.float32)
    for got, want in zip(
        value_and_gradients(gelu, gate),
        value_and_gradients(lambda x: jax.nn.gelu(x, approximate=True), gate),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("function", PLAIN, ids=lambda function: function.__name__)
def test_large_gates_stay_finite(function):
    gate, up = inputs(jnp.float32, scale=1e4)
    assert all(np.isfinite(a).all() for a in value_and_gradients(function, gate, up))
