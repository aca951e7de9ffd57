"""`dot` rounds its output and nothing more, in every form in which a CPU may multiply."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.ops.dot import dot


@pytest.fixture(params=[False, True], ids=["widened", "native"])
def native(request, monkeypatch):
    monkeypatch.setattr("jaxdist.ops.product.cpu_multiplies_bf16", lambda: request.param)
    return request.param


def _arrays(shape_x=(2, 6, 32), n=16, dtype=jnp.bfloat16):
    x_key, w_key = jax.random.split(jax.random.key(1))
    x = jax.random.normal(x_key, shape_x, dtype)
    return x, jax.random.normal(w_key, (shape_x[-1], n)) * 0.1


def _double(x, w, dout):
    """Value and gradients in numpy's float64."""
    x, w, dout = (np.asarray(a, np.float64) for a in (x, w, dout))
    k, n = w.shape
    return x @ w, dout @ w.T, x.reshape(-1, k).T @ dout.reshape(-1, n)


SHAPES = [(2, 6, 32), (1, 1, 32), (1, 32), (7, 32), (2, 1, 32), (1, 128, 32)]
QUICK = [(shape, 16) for shape in SHAPES] + [((1, 32), 1), ((2, 6, 32), 130)]


@pytest.mark.parametrize(
    "shape_x, n",
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(SHAPES, (1, 16, 130))
    ],
)
def test_bf16_forward_and_backward(native, shape_x, n):
    x, w = _arrays(shape_x, n)
    out, vjp = jax.jit(lambda x, w: jax.vjp(partial(dot, compute_dtype=jnp.bfloat16), x, w))(x, w)
    dout = jax.random.normal(jax.random.key(2), out.shape, out.dtype)
    dx, dw = jax.jit(lambda vjp, dout: vjp(dout))(vjp, dout)
    assert (out.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    for got, expected in zip((out, dx), _double(x, w, dout)[:2], strict=True):
        error = np.abs(np.asarray(got, np.float64) - expected)
        assert error.max() < 2**-7 * np.abs(expected).max()
    # Inputs are bf16 already, so the fp32 gradient of w has no rounding but the sum's.
    expected = _double(x, w, dout)[2]
    np.testing.assert_allclose(np.asarray(dw, np.float64), expected, rtol=1e-5, atol=1e-5)


def test_fp32_is_fp32():
    x, w = _arrays(dtype=jnp.float32)
    out = dot(x, w, jnp.float32)
    np.testing.assert_allclose(out, _double(x, w, out)[0], rtol=1e-5, atol=1e-6)


def test_keeps_the_master_weight_and_the_input_themselves():
    x, w = _arrays()
    closed = jax.make_jaxpr(lambda x, w: jax.vjp(partial(dot, compute_dtype=jnp.bfloat16), x, w))(
        x, w
    )
    _, *residuals = closed.jaxpr.outvars
    assert set(residuals) == set(closed.jaxpr.invars)


@pytest.mark.parametrize(
    "sharded_dim, dtype",
    [
        *(("rows", jnp.float32), ("columns", jnp.bfloat16)),
        pytest.param("rows", jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("columns", jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_sharded_over_tp(value_and_grads, native, sharded, sharded_dim, dtype):
    """Columns need a sum for dx, rows one for the output, and the gradient of w needs none."""
    x, w = _arrays((4, 6, 32), dtype=dtype)
    specs = (P(), P(None, None, "tp"))
    if sharded_dim == "rows":
        specs = (P(None, None, "tp"), P(None, "tp", None))

    def op(x, w):
        return dot(x, w[0], dtype)

    args = (x, jnp.stack([w, w]))
    result = sharded(op, args, specs)
    assert result.collectives <= {"all-reduce"}
    out, (dx, dw) = result.grads
    tolerance = 1e-6 if dtype == jnp.float32 else 2**-7
    for member in range(2):
        rows = slice(2 * member, 2 * member + 2)
        plain = jax.jit(partial(value_and_grads, lambda x, w: dot(x, w, dtype)))
        out_1, (dx_1, dw_1) = plain(x[rows], w)
        for got, expected in ((out[rows], out_1), (dx[rows], dx_1), (dw[member], dw_1)):
            got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
            np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * abs(expected).max())
