from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.training.muon import orthogonalize, scale_by_muon

orthogonal = jax.jit(orthogonalize)


def normal(shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16)])
def test_singular_values_become_about_one_in_the_same_directions(shape):
    matrix = normal(shape)
    u, _, v = np.linalg.svd(matrix, full_matrices=False)
    ours = np.asarray(orthogonal(matrix))
    assert np.all(np.abs(np.linalg.svd(ours, compute_uv=False) - 1) < 0.35)
    kept = u.T @ ours @ v.T  # diagonal where the singular vectors are kept
    np.testing.assert_allclose(kept - np.diag(np.diag(kept)), 0, atol=2e-5)


def test_a_stack_equals_a_loop_over_its_matrices():
    sizes = jnp.asarray([1e-6, 1.0, 1e4])  # the norm is each matrix's own
    stack = normal((3, 8, 24)) * sizes[:, None, None]
    alone = [orthogonal(matrix) for matrix in stack]
    np.testing.assert_allclose(orthogonal(stack), np.stack(alone), atol=1e-5)


def test_zero_gradients_give_zero_updates():
    assert not np.any(orthogonal(jnp.zeros((4, 8))))


@pytest.mark.parametrize("shape", [(32, 32), (16, 64), (64, 16)])
def test_updates_have_the_rms_of_adamw(shape):
    gradient = {"w": normal(shape)}
    muon = scale_by_muon(0.95)
    update: Any = jax.jit(muon.update)(gradient, muon.init(gradient))[0]
    assert np.sqrt(np.mean(np.square(update["w"]))) == pytest.approx(0.2, rel=0.2)
