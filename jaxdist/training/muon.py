"""Muon: momentum whose matrices are made orthogonal (Jordan et al., 2024; arXiv 2502.16982)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

# Quintic Newton-Schulz with the steepest slope at 0 (Jordan): after 5 steps singular values lie in
# about [0.7, 1.2], which trains as well as 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS = 5
_RMS = 0.2  # of AdamW's usual update: one learning rate and decay then serve both (2502.16982, 2.2)


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum of matrices [..., in, out], made orthogonal, with 0.2 RMS per entry."""
    return optax.chain(optax.trace(momentum, nesterov=True), optax.stateless(_orthogonal_updates))


def orthogonalize(matrix: jax.Array) -> jax.Array:
    """U V^T, about, of `matrix` = U S V^T: [..., in, out] -> [..., in, out], each on its own."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix  # the Gram matrix is then the smaller of the two
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def _orthogonal_updates(updates: Any, params: Any) -> Any:
    del params

    def update(momentum: jax.Array) -> jax.Array:
        return orthogonalize(momentum) * (_RMS * max(momentum.shape[-2:]) ** 0.5)

    return jax.tree.map(update, updates)
