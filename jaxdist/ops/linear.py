"""How a served weight is laid out and multiplied: what a backend wants, decided once, at load.

The layers of a server are stacks [L, ...], and a loop walks over them. GPUs and TPUs take a layer
[K, N] of a stack as it lies. On the CPU it would be copied out for each product, and one of 16 bits
widened whole besides: there a stack lies in blocks of some columns, [L, N / LANES, K, LANES], of
which a product reads one after the other, each once. CPUs that multiply bf16 do so with some
blocks at a time; for the others a block is widened and multiplied in the cache. 16-bit floats are
kept as bits: XLA would widen all layers before the first.

Shapes: x [..., K] the activation, [N, K] a table of embeddings, the result [..., N].
"""

import math
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdist.ops.product import multiplied_dtype, product
from jaxdist.ops.stacks import read

Split = Literal["whole", "columns", "rows"]  # what of a weight [K, N] the members of tp share

LANES = 64
FEW = 64  # rows of x up to which blocks of bf16 are multiplied as they lie
TOGETHER = 16  # of them that are multiplied at once
# Rows of a weight that are multiplied in one go, at most and, where there are as many, at least.
# XLA:CPU's kernel adds up to 512 in order; more it cuts in ways that depend on the rows of x, and
# so would the result: a prompt with a cached beginning would not give what it gives as a whole.
DEPTH, LEAST_DEPTH = 256, 32


@partial(jax.tree_util.register_dataclass, data_fields=["stack", "layer"], meta_fields=["split"])
@dataclass(frozen=True)
class Blocks:
    """One layer's weight in blocks, left where it lies."""

    stack: jax.Array  # [L, N / LANES, K, LANES] fp32, or bits of bf16
    layer: jax.Array | int
    split: Split = "whole"  # over tp

    @property
    def ndim(self) -> int:
        """Of the weight that it stands for."""
        return 2

    def __getitem__(self, index: EllipsisType) -> "Blocks":
        """Itself: a Module asks for its parameter's whole value so."""
        return self


def fits_blocks(num_rows: int, num_columns: int, dtype: DTypeLike, platform: str) -> bool:
    """Whether a weight [rows, columns] is better kept in blocks."""
    fits = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32) and num_columns % LANES == 0
    part = num_rows // _num_parts(num_rows)
    return platform == "cpu" and fits and part >= min(num_rows, LEAST_DEPTH)


def in_blocks(w: jax.Array) -> jax.Array:
    """fp32 or bf16 [..., K, N] as [..., N / LANES, K, LANES], bf16 as bits."""
    *lead, rows, columns = w.shape
    if w.dtype == jnp.bfloat16:
        w = lax.bitcast_convert_type(w, jnp.uint16)
    return jnp.moveaxis(w.reshape(*lead, rows, columns // LANES, LANES), -2, -3)


def linear(x: jax.Array, w: jax.Array | Blocks, compute_dtype: DTypeLike) -> jax.Array:
    """x @ w in fp32 [..., N], of a plain weight [K, N] or one in blocks."""
    if not isinstance(w, Blocks):
        return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype)
    *lead, depth = x.shape
    x_RK = x.reshape(-1, depth)
    if w.stack.dtype != jnp.uint16 or multiplied_dtype(compute_dtype) != jnp.bfloat16:
        out_RN = _one_by_one(x_RK.astype(jnp.float32), w)
    elif len(x_RK) <= FEW:
        out_RN = _some_together(x_RK.astype(jnp.bfloat16), w)
    else:
        plain = jnp.moveaxis(_floats(read(w.stack, w.layer)), 0, 1).reshape(depth, -1)
        out_RN = product(x_RK, plain, ((1,), (0,)), compute_dtype=plain.dtype)
    return out_RN.reshape(*lead, -1)


def in_parts(x_RK: jax.Array) -> jax.Array:
    """x [R, K] for `sum_of_parts`: [P, R, K / P]."""
    rows, depth = x_RK.shape
    return jnp.moveaxis(x_RK.reshape(rows, _num_parts(depth), -1), 1, 0)


def sum_of_parts(x_PRk: jax.Array, w_KL: jax.Array) -> jax.Array:
    """fp32 x, in parts, times a block of a weight [K, L] -> [R, L].

    The parts are one batch, and added in order: a row of x gives the same bits among any number.
    """
    num_parts, _, depth = x_PRk.shape
    w_PkL = w_KL.reshape(num_parts, depth, -1)
    sums_PRL = lax.dot_general(
        x_PRk, w_PkL, (((2,), (1,)), ((0,), (0,))), precision=lax.Precision.HIGHEST
    )
    return sum(sums_PRL[1:], sums_PRL[0])


def _num_parts(depth: int) -> int:
    """The fewest equal parts of at most `DEPTH` rows."""
    return next(n for n in range(-(-depth // DEPTH), depth + 1) if depth % n == 0)


def _one_by_one(x_RK: jax.Array, w: Blocks) -> jax.Array:
    """fp32 x times each block, widened in turn."""
    _, num_blocks, depth, lanes = w.stack.shape
    x_PRk = in_parts(x_RK)

    def block(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        start = (jnp.int32(w.layer), number, 0 * number, 0 * number)
        block_KL = lax.dynamic_slice(w.stack, start, (1, 1, depth, lanes))[0, 0]
        if block_KL.dtype == jnp.uint16:
            # Or the widening would be done again for each row, inside of the product.
            block_KL = lax.optimization_barrier(_widened(block_KL))
        return lax.dynamic_update_index_in_dim(out_CRL, sum_of_parts(x_PRk, block_KL), number, 0)

    start = jnp.zeros((num_blocks, len(x_RK), lanes))
    out_CRL = lax.fori_loop(0, num_blocks, block, start)
    return jnp.moveaxis(out_CRL, 0, 1).reshape(len(x_RK), -1)


def _some_together(x_RK: jax.Array, w: Blocks) -> jax.Array:
    """bf16 x times the blocks, `TOGETHER` at a time, which the cache holds."""
    rows, depth = x_RK.shape
    if rows == 1:  # one row of 16-bit floats has no kernel at all
        x_RK = jnp.concatenate([x_RK, x_RK])
    _, num_blocks, _, lanes = w.stack.shape
    size = math.gcd(num_blocks, TOGETHER)
    x_CRK = jnp.broadcast_to(x_RK[None], (size, *x_RK.shape))

    def group(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        start = (jnp.int32(w.layer), number * size, 0 * number, 0 * number)
        part_CKL = _floats(lax.dynamic_slice(w.stack, start, (1, size, depth, lanes))[0])
        found_CRL = lax.dot_general(
            x_CRK, part_CKL, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32
        )
        return lax.dynamic_update_slice_in_dim(out_CRL, found_CRL, number * size, 0)

    start = jnp.zeros((num_blocks, x_RK.shape[0], lanes))
    out_CRL = lax.fori_loop(0, num_blocks // size, group, start)
    return jnp.moveaxis(out_CRL, 0, 1).reshape(x_RK.shape[0], -1)[:rows]


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _widened(bits: jax.Array) -> jax.Array:
    """The fp32 values of bf16 bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
