"""How a served weight is laid out and multiplied: what a backend wants, decided once, at load.

The layers of a server are stacks [L, ...], and a loop walks over them. GPUs and TPUs take a layer
[K, N] of a stack as it lies. On the CPU it would be copied out for each product, and one of 16 bits
widened whole besides: there a stack lies in blocks of some columns, [L, N / lanes, K, lanes], of
which a product reads one after the other, each once. CPUs that multiply bf16 do so with some
blocks at a time; for the others a block is widened and multiplied in the cache. 16-bit floats are
kept as bits: XLA would widen all layers before the first.

Shapes: x [..., K] the activation, [N, K] a table of embeddings, the result [..., N].
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdist.ops.product import cpu_multiplies_bf16, product
from jaxdist.ops.stacks import read

Split = Literal["whole", "columns", "rows"]  # what of a weight [K, N] the members of tp share

LANES = 64
FEW = 64  # rows up to which blocks are multiplied as they lie
TOGETHER = 16  # blocks that are multiplied at once where bf16 is
# Rows of a weight that are multiplied together. XLA:CPU's kernel adds up so many in one go and in
# order; more it cuts in ways that may depend on the rows of x, and so would the result: a prompt
# with a cached beginning would not give what it gives as a whole.
DEPTH = 128


@partial(jax.tree_util.register_dataclass, data_fields=["stack", "layer"], meta_fields=["split"])
@dataclass(frozen=True)
class Blocks:
    """One layer's weight in blocks, left where it lies."""

    stack: jax.Array  # [L, N / lanes, K, lanes] fp32, or bits of bf16
    layer: jax.Array | int
    split: Split = "whole"  # over tp

    @property
    def ndim(self) -> int:
        """Of the weight that it stands for."""
        return 2

    def __getitem__(self, index: EllipsisType) -> "Blocks":
        """Itself: a Module asks for its parameter's whole value so."""
        return self


def fits_blocks(num_columns: int, dtype: DTypeLike, platform: str) -> bool:
    """Whether a weight of so many columns is better kept in blocks."""
    fits = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float32)
    return platform == "cpu" and fits and num_columns % LANES == 0


def lanes_of(num_columns: int) -> int:
    """Columns of a block of such a weight: `LANES` where bf16 is multiplied; else more, because a
    product of few rows costs as much to start as to run, but not so many that the kernel would
    share them among threads, in other parts for other numbers of rows."""
    widths = (1,) if cpu_multiplies_bf16() else (3, 2, 1)
    return next(LANES * n for n in widths if num_columns % (LANES * n) == 0)


def in_blocks(w: jax.Array, lanes: int = LANES) -> jax.Array:
    """fp32 or bf16 [..., K, N] as [..., N / lanes, K, lanes], bf16 as bits."""
    *lead, rows, columns = w.shape
    if w.dtype == jnp.bfloat16:
        w = lax.bitcast_convert_type(w, jnp.uint16)
    return jnp.moveaxis(w.reshape(*lead, rows, columns // lanes, lanes), -2, -3)


def linear(x: jax.Array, w: jax.Array | Blocks, compute_dtype: DTypeLike) -> jax.Array:
    """x @ w in fp32 [..., N], of a plain weight [K, N] or one in blocks."""
    if not isinstance(w, Blocks):
        return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype)
    *lead, depth = x.shape
    rows = math.prod(lead)
    x_RK = x.reshape(rows, depth)
    is_half = w.stack.dtype == jnp.uint16
    if rows > FEW:
        plain_CKL = read(w.stack, w.layer)
        if is_half:
            plain_CKL = _floats(plain_CKL) if cpu_multiplies_bf16() else _widened(plain_CKL)
        plain = jnp.moveaxis(plain_CKL, 0, 1).reshape(depth, -1)
        if plain.dtype == jnp.float32:
            out_RN = _in_parts(
                x_RK.astype(jnp.float32), lambda first, size: plain[first : first + size]
            )
        else:
            out_RN = product(x_RK, plain, ((1,), (0,)), compute_dtype=plain.dtype)
    elif is_half and cpu_multiplies_bf16():
        out_RN = _some_together(x_RK.astype(jnp.bfloat16), w)
    else:
        out_RN = _one_by_one(x_RK.astype(jnp.float32), w)
    return out_RN.reshape(*lead, -1)


def _one_by_one(x_RK: jax.Array, w: Blocks) -> jax.Array:
    """fp32 x times each block, widened in turn."""
    num_rows, depth = x_RK.shape
    _, num_blocks, _, lanes = w.stack.shape

    def block(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        def part(first: int, size: int) -> jax.Array:
            start = (jnp.int32(w.layer), number, 0 * number + first, 0 * number)
            part_KL = lax.dynamic_slice(w.stack, start, (1, 1, size, lanes))[0, 0]
            # Or the widening would be done again for each row, inside of the product.
            is_half = part_KL.dtype == jnp.uint16
            return lax.optimization_barrier(_widened(part_KL)) if is_half else part_KL

        return lax.dynamic_update_index_in_dim(out_CRL, _in_parts(x_RK, part), number, 0)

    start = jnp.zeros((num_blocks, num_rows, lanes))
    out_CRL = lax.fori_loop(0, num_blocks, block, start)
    return jnp.moveaxis(out_CRL, 0, 1).reshape(num_rows, -1)


def _in_parts(x_RK: jax.Array, part: Callable[[int, int], jax.Array]) -> jax.Array:
    """fp32 x times a weight [K, N] whose rows `part(first, size)` gives, `DEPTH` at a time."""
    depth = x_RK.shape[1]
    sums = []
    for first in range(0, depth, DEPTH):
        size = min(DEPTH, depth - first)
        sums.append(_matmul(x_RK[:, first : first + size], part(first, size)))
    return sum(sums[1:], sums[0])


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


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _widened(bits: jax.Array) -> jax.Array:
    """The fp32 values of bf16 bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
