"""How a served weight is laid out and multiplied: what a backend wants, decided once, at load.

GPUs and TPUs take plain weights [K, N]. XLA:CPU has no good kernel for a few rows times a 16-bit
matrix: a plain one is widened for each product. In blocks of `LANES` columns, [N / LANES, K,
LANES], it is read once and multiplied as it comes, in half the bytes of fp32.

Shapes: x [..., K] the activation, [N, K] a table of embeddings, the result [..., N].
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.ops.product import product

LANES = 64
FEW = 64  # rows up to which blocks are multiplied as they lie


def fits_blocks(num_columns: int, dtype: DTypeLike, platform: str) -> bool:
    """Whether a weight of so many columns is better kept in blocks."""
    sixteen_bits = jnp.dtype(dtype) == jnp.bfloat16
    return platform == "cpu" and sixteen_bits and num_columns % LANES == 0


def in_blocks(w: jax.Array) -> jax.Array:
    """[..., K, N] as [..., N / LANES, K, LANES]."""
    *lead, rows, columns = w.shape
    return jnp.moveaxis(w.reshape(*lead, rows, columns // LANES, LANES), -2, -3)


def linear(x: jax.Array, w: jax.Array, compute_dtype: DTypeLike) -> jax.Array:
    """x @ w in fp32 [..., N], of a plain weight [K, N] or one in blocks."""
    if w.ndim == 2:
        return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype)
    *lead, depth = x.shape
    rows = math.prod(lead)
    if rows > FEW:
        plain = jnp.moveaxis(w, 0, 1).reshape(depth, -1)
        return product(x, plain, ((x.ndim - 1,), (0,)), compute_dtype=jnp.float32)
    x_RK = x.reshape(rows, depth).astype(w.dtype)
    if rows == 1:  # one row of 16-bit floats has no kernel at all
        x_RK = jnp.concatenate([x_RK, x_RK])
    x_CRK = jnp.broadcast_to(x_RK[None], (w.shape[0], *x_RK.shape))
    out_CRL = jax.lax.dot_general(
        x_CRK, w, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    out_RN = jnp.moveaxis(out_CRL, 0, 1).reshape(x_RK.shape[0], -1)
    return out_RN[:rows].reshape(*lead, -1)
