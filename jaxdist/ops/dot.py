"""The matrix product of every linear layer.

Shapes: x [..., K] is the activation, w [K, N] the master weight, the result [..., N].
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def dot(x: jax.Array, w: jax.Array, compute_dtype: DTypeLike) -> jax.Array:
    """x [..., K] @ w [K, N] -> [..., N] in `compute_dtype`, accumulated in fp32."""
    precision = jax.lax.Precision.HIGHEST if compute_dtype == jnp.float32 else None
    out = jnp.matmul(
        x.astype(compute_dtype),
        w.astype(compute_dtype),
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    return out.astype(compute_dtype)
