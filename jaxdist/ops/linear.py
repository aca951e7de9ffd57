"""How a served weight is laid out and multiplied: what a backend wants, decided once, at load.

GPUs and TPUs take plain weights [K, N]. XLA:CPU has no good kernel for a few rows times a 16-bit
matrix: a plain one is widened whole for each product, in memory. In blocks of `LANES` columns,
[N / LANES, K, LANES], it is read once, in half the bytes of fp32. CPUs that multiply bf16 multiply
all blocks together as they come. For the others a block is widened in the cache and multiplied
there, one after the other; they keep it as bits, since of 16-bit floats XLA would widen all before
the first. (One Zen 3 core, 16 rows of 576 x 1536, cold: about 32 GFLOP/s; all blocks together 21,
plain fp32 13.)

Shapes: x [..., K] the activation, [N, K] a table of embeddings, the result [..., N].
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdist.ops.product import cpu_multiplies_bf16, product

LANES = 64
FEW = 64  # rows up to which blocks are multiplied as they lie
DEPTH = 768  # rows of a block that are widened together: 200 KB of fp32 stay in the cache


def fits_blocks(num_columns: int, dtype: DTypeLike, platform: str) -> bool:
    """Whether a weight of so many columns is better kept in blocks."""
    sixteen_bits = jnp.dtype(dtype) == jnp.bfloat16
    return platform == "cpu" and sixteen_bits and num_columns % LANES == 0


def in_blocks(w: jax.Array, *, as_bits: bool | None = None) -> jax.Array:
    """bf16 [..., K, N] as [..., N / LANES, K, LANES].

    as_bits: As uint16; None where this CPU has no products of bf16.
    """
    *lead, rows, columns = w.shape
    if as_bits if as_bits is not None else not cpu_multiplies_bf16():
        w = lax.bitcast_convert_type(w, jnp.uint16)
    return jnp.moveaxis(w.reshape(*lead, rows, columns // LANES, LANES), -2, -3)


def linear(x: jax.Array, w: jax.Array, compute_dtype: DTypeLike) -> jax.Array:
    """x @ w in fp32 [..., N], of a plain weight [K, N] or one in blocks."""
    if w.ndim == 2:
        return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype)
    *lead, depth = x.shape
    rows = math.prod(lead)
    x_RK = x.reshape(rows, depth)
    is_bits = w.dtype == jnp.uint16
    if rows > FEW:
        plain = jnp.moveaxis(_widened(w) if is_bits else w, 0, 1).reshape(depth, -1)
        out_RN = product(x_RK, plain, ((1,), (0,)), compute_dtype=jnp.float32)
    elif is_bits:
        out_RN = _one_by_one(x_RK.astype(jnp.float32), w)
    else:
        out_RN = _together(x_RK.astype(w.dtype), w)
    return out_RN.reshape(*lead, -1)


def _one_by_one(x_RK: jax.Array, bits_CKL: jax.Array) -> jax.Array:
    """fp32 x times each block of bits, widened in turn."""
    num_rows, depth = x_RK.shape
    num_blocks, _, lanes = bits_CKL.shape

    def block(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        sums = []
        for first in range(0, depth, DEPTH):
            size = min(DEPTH, depth - first)
            part_1KL = lax.dynamic_slice(bits_CKL, (number, first, 0), (1, size, lanes))
            # Or the widening would be done again for each row, inside of the product.
            part_KL = lax.optimization_barrier(_widened(part_1KL[0]))
            sums.append(_matmul(x_RK[:, first : first + size], part_KL))
        return lax.dynamic_update_index_in_dim(out_CRL, sum(sums[1:], sums[0]), number, 0)

    start = jnp.zeros((num_blocks, num_rows, lanes))
    out_CRL = lax.fori_loop(0, num_blocks, block, start)
    return jnp.moveaxis(out_CRL, 0, 1).reshape(num_rows, -1)


def _together(x_RK: jax.Array, w_CKL: jax.Array) -> jax.Array:
    """bf16 x times all blocks."""
    rows = x_RK.shape[0]
    if rows == 1:  # one row of 16-bit floats has no kernel at all
        x_RK = jnp.concatenate([x_RK, x_RK])
    x_CRK = jnp.broadcast_to(x_RK[None], (w_CKL.shape[0], *x_RK.shape))
    out_CRL = lax.dot_general(
        x_CRK, w_CKL, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
    )
    return jnp.moveaxis(out_CRL, 0, 1).reshape(x_RK.shape[0], -1)[:rows]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _widened(bits: jax.Array) -> jax.Array:
    """The fp32 values of bf16 bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
