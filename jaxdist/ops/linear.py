"""How a served weight is laid out and multiplied: what a backend wants, decided once, at load.

The layers of a server are stacks [L, ...], and a loop walks over them. GPUs and TPUs take a layer
[K, N] of a stack as it lies. XLA:CPU would copy it out for each product, and widen one of 16 bits
besides. On CPUs a stack lies in blocks of some columns, [L, N / LANES, K, LANES], which a kernel of
our own multiplies where they lie (`kernels/product.py`); where it cannot run, XLA widens one block
after the other in the cache. bf16 is kept as the bits of two numbers that follow one another in a
column, [L, N / LANES, K / 2, LANES]: so does the processor multiply them.

Shapes: x [..., K] the activation, the result [..., N].
"""

from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxdist.ops import kernels
from jaxdist.ops.product import multiplied_dtype, product

Split = Literal["whole", "columns", "rows"]  # what of a weight [K, N] the members of tp share

LANES = 64
# Rows of a weight that XLA multiplies in one go, at most and, where there are as many, at least.
# Its kernel adds up to 512 in order; more it cuts in ways that depend on the rows of x, and so
# would the result: a prompt with a cached beginning would not give what it gives as a whole.
DEPTH, LEAST_DEPTH = 256, 32


@partial(jax.tree_util.register_dataclass, data_fields=["stack", "layer"], meta_fields=["split"])
@dataclass(frozen=True)
class Blocks:
    """One layer's weight in blocks, left where it lies."""

    stack: jax.Array  # [L, N / LANES, K, LANES] fp32, or [L, N / LANES, K / 2, LANES] pairs
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
    if platform != "cpu" or num_columns % LANES:
        return False
    in_pairs = jnp.dtype(dtype) == jnp.bfloat16
    if not in_pairs and jnp.dtype(dtype) != jnp.float32:
        return False
    part = num_rows // _num_parts(num_rows)
    return num_rows % (2 if in_pairs else 1) == 0 and part >= min(num_rows, LEAST_DEPTH)


def in_blocks(w: jax.Array) -> jax.Array:
    """fp32 [..., K, N] as [..., N / LANES, K, LANES]; bf16 as pairs [..., N / LANES, K / 2, LANES].

    Of a pair's 32 bits the lower 16 are the earlier row's.
    """
    *lead, rows, columns = w.shape
    blocks = jnp.moveaxis(w.reshape(*lead, rows, columns // LANES, LANES), -2, -3)
    if w.dtype != jnp.bfloat16:
        return blocks
    bits = lax.bitcast_convert_type(blocks, jnp.uint16).astype(jnp.uint32)
    earlier, later = jnp.unstack(bits.reshape(*bits.shape[:-2], rows // 2, 2, LANES), axis=-2)
    return earlier | later << 16


def linear(x: jax.Array, w: jax.Array | Blocks, compute_dtype: DTypeLike) -> jax.Array:
    """x @ w in fp32 [..., N], of a plain weight [K, N] or one in blocks."""
    if not isinstance(w, Blocks):
        return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype)
    *lead, depth = x.shape
    x_RK = x.reshape(-1, depth).astype(multiplied_dtype(compute_dtype))
    multiplied = kernels.multiply if kernels.available() else block_by_block
    return multiplied(x_RK, w.stack, w.layer).reshape(*lead, -1)


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


def block_by_block(x_RK: jax.Array, stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    """`kernels.multiply` [R, N] as XLA does it: x in fp32 times each block, widened in turn."""
    _, num_blocks, depth, lanes = stack.shape
    x_PRk = in_parts(x_RK.astype(jnp.float32))

    def block(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        start = (jnp.int32(layer), number, 0 * number, 0 * number)
        block_KL = lax.dynamic_slice(stack, start, (1, 1, depth, lanes))[0, 0]
        if block_KL.dtype == jnp.uint32:
            # Or the widening would be done again for each row, inside of the product.
            block_KL = lax.optimization_barrier(_widened(block_KL))
        return lax.dynamic_update_index_in_dim(out_CRL, sum_of_parts(x_PRk, block_KL), number, 0)

    start = jnp.zeros((num_blocks, len(x_RK), lanes))
    out_CRL = lax.fori_loop(0, num_blocks, block, start)
    return jnp.moveaxis(out_CRL, 0, 1).reshape(len(x_RK), -1)


def _widened(pairs: jax.Array) -> jax.Array:
    """The fp32 values [K, LANES] of pairs [K / 2, LANES] of bf16."""
    both = jnp.stack([pairs << 16, pairs & jnp.uint32(0xFFFF0000)], axis=1)
    return lax.bitcast_convert_type(both.reshape(-1, pairs.shape[-1]), jnp.float32)
