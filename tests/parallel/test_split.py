"""The two halves of a backward against the whole of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.parallel.split import split_backward

TOKENS, WIDTH = 6, 4


@jax.custom_vjp
def looped(x, w):
    """x @ w, whose backward makes both gradients in one loop over rows."""
    return x @ w


def pulled_in_a_loop(kept, dout):
    x, w = kept

    def body(row, carry):
        dx, dw = carry
        return dx.at[row].set(w @ dout[row]), dw + jnp.outer(x[row], dout[row])

    return jax.lax.fori_loop(0, TOKENS, body, (jnp.zeros_like(x), jnp.zeros_like(w)))


looped.defvjp(lambda x, w: (looped(x, w), (x, w)), pulled_in_a_loop)


def layer(parameters, x):
    gain, plain, joint = parameters
    return looped(jnp.tanh(x * gain[None] @ plain), joint)


def split(dtype=jnp.float32):
    """The halves, what both are given, the cotangent and the whole backward's results."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (WIDTH,), (WIDTH, WIDTH), (WIDTH, WIDTH), (TOKENS, WIDTH), (TOKENS, WIDTH)
    *parameters, x, cotangent = (jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))

    def cast(parameters, x):
        return layer([p.astype(jnp.float32) for p in parameters], x)

    _, pull = jax.vjp(cast, [p.astype(dtype) for p in parameters], x)
    known, tree = jax.tree.flatten(pull)

    def backward(known, cotangents):
        gradients, dx = jax.tree.unflatten(tree, known)(*cotangents)
        return gradients, dx

    halves = split_backward(backward, known, [cotangent], [False, True, True])
    return halves, known, [cotangent], backward(known, [cotangent])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_gradient_made_with_the_input_s_cotangent_does_not_wait(dtype):
    halves, known, given, (gradients, dx) = split(dtype)
    assert halves.is_late == [False, True, False]
    early_dx, early, taps = halves.early(known, given)
    assert [tap.shape for tap in taps] == [(TOKENS, WIDTH)], "the cotangent of x @ plain alone"
    found = [early[0], *halves.late(known, taps), early[1]]
    for a, b in zip([early_dx, *found], [dx, *gradients], strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
