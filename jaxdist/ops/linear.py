"""How a served weight is laid out and multiplied: what a backend wants, decided once, at load.

The layers of a server are stacks [L, ...], and a loop walks over them. GPUs and TPUs take a layer
[K, N] of a stack as it lies. On the CPU it would be copied out for each product, and one of 16 bits
widened whole besides: there a stack lies in blocks of some columns, [L, N / LANES, K, LANES], of
which a product widens one after the other in the cache. 16-bit floats are kept as bits: XLA would
widen all layers before the first. CPUs that multiply bf16 need no copy at all: their stacks are cut
into arrays of some blocks, and a branch for each multiplies it where it lies.

Shapes: x [..., K] the activation, [N, K] a table of embeddings, the result [..., N].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Literal

import einops
import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxdist.ops.product import cpu_multiplies_bf16, multiplied_dtype, product

Split = Literal["whole", "columns", "rows"]  # what of a weight [K, N] the members of tp share

LANES = 64
TOGETHER = 16  # blocks of bf16 that are multiplied at once, at most
ROWS = 128  # of x that are, at most
# Rows of a weight that are multiplied in one go, at most and, where there are as many, at least.
# XLA:CPU's kernel adds up to 512 in order; more it cuts in ways that depend on the rows of x, and
# so would the result: a prompt with a cached beginning would not give what it gives as a whole.
DEPTH, LEAST_DEPTH = 256, 32


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["arrays"],
    meta_fields=["per_layer", "num_columns"],
)
@dataclass(frozen=True)
class Pieces:
    """A stack in blocks of bf16, cut into arrays of at most `TOGETHER` blocks.

    The last array of a layer is as large as the others, which its zeros fill.
    """

    arrays: tuple[jax.Array, ...]  # L * per_layer times [blocks, K, LANES]
    per_layer: int
    num_columns: int  # of a layer, on one member

    @property
    def ndim(self) -> int:
        """Of the stack that it stands for."""
        return 4

    def __getitem__(self, index: EllipsisType) -> "Pieces":
        """Itself: a Module asks for its parameter's whole value so."""
        return self


@partial(jax.tree_util.register_dataclass, data_fields=["stack", "layer"], meta_fields=["split"])
@dataclass(frozen=True)
class Blocks:
    """One layer's weight in blocks, left where it lies."""

    stack: jax.Array | Pieces  # [L, N / LANES, K, LANES] fp32, or bits of bf16
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


def fits_pieces(dtype: DTypeLike) -> bool:
    """Whether blocks are better kept in pieces."""
    return jnp.dtype(dtype) == jnp.bfloat16 and cpu_multiplies_bf16()


def in_blocks(w: jax.Array) -> jax.Array:
    """fp32 or bf16 [..., K, N] as [..., N / LANES, K, LANES], bf16 as bits."""
    *lead, rows, columns = w.shape
    if w.dtype == jnp.bfloat16:
        w = lax.bitcast_convert_type(w, jnp.uint16)
    return jnp.moveaxis(w.reshape(*lead, rows, columns // LANES, LANES), -2, -3)


def in_pieces(blocks: jax.Array, num_members: int = 1) -> Pieces:
    """Bits of bf16 [..., L, N / LANES, K, LANES] as arrays [..., blocks, K, LANES] of bf16.

    num_members: That share the columns; each has its own blocks of each array.
    """
    *lead, num_layers, num_blocks, depth, lanes = blocks.shape
    own = num_blocks // num_members
    count, size = _cut(own, TOGETHER)
    blocks = _floats(blocks).reshape(*lead, num_layers, num_members, own, depth, lanes)
    blocks = _filled(blocks, -3, count * size)
    blocks = blocks.reshape(*lead, num_layers, num_members, count, size, depth, lanes)
    blocks = jnp.moveaxis(blocks, -4, -5)
    blocks = blocks.reshape(*lead, num_layers * count, num_members * size, depth, lanes)
    arrays = (blocks[..., number, :, :, :] for number in range(num_layers * count))
    return Pieces(tuple(arrays), count, own * lanes)


def linear(x: jax.Array, w: jax.Array | Blocks, compute_dtype: DTypeLike) -> jax.Array:
    """x @ w in fp32 [..., N], of a plain weight [K, N] or one in blocks."""
    if not isinstance(w, Blocks):
        return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype)
    *lead, depth = x.shape
    x_RK = x.reshape(-1, depth)
    if isinstance(w.stack, Pieces):
        out_RN = _where_they_lie(x_RK.astype(multiplied_dtype(compute_dtype)), w.stack, w.layer)
    else:
        out_RN = _one_by_one(x_RK.astype(jnp.float32), w.stack, w.layer)
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


def _cut(number: int, most: int) -> tuple[int, int]:
    """The fewest parts of at most `most`, and their size, of which the last may lack a little."""
    count = -(-number // most)
    return count, -(-number // count)


def _filled(array: jax.Array, dim: int, size: int) -> jax.Array:
    """With zeros after it, so that `dim` has `size`."""
    widths = [(0, 0)] * array.ndim
    widths[dim] = (0, size - array.shape[dim])
    return jnp.pad(array, widths)


def _one_by_one(x_RK: jax.Array, stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    """fp32 x times each block, widened in turn."""
    _, num_blocks, depth, lanes = stack.shape
    x_PRk = in_parts(x_RK)

    def block(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        start = (jnp.int32(layer), number, 0 * number, 0 * number)
        block_KL = lax.dynamic_slice(stack, start, (1, 1, depth, lanes))[0, 0]
        if block_KL.dtype == jnp.uint16:
            # Or the widening would be done again for each row, inside of the product.
            block_KL = lax.optimization_barrier(_widened(block_KL))
        return lax.dynamic_update_index_in_dim(out_CRL, sum_of_parts(x_PRk, block_KL), number, 0)

    start = jnp.zeros((num_blocks, len(x_RK), lanes))
    out_CRL = lax.fori_loop(0, num_blocks, block, start)
    return jnp.moveaxis(out_CRL, 0, 1).reshape(len(x_RK), -1)


def _where_they_lie(x_RK: jax.Array, stack: Pieces, layer: jax.Array | int) -> jax.Array:
    """x times each piece of a layer.

    An array that is chosen by a branch is multiplied in place; one read out of a stack is copied.
    """
    rows, depth = x_RK.shape
    count, size = _cut(max(rows, 2), ROWS)  # one row of 16-bit floats has no kernel at all
    x_GRK = _filled(x_RK, 0, count * size).reshape(count, size, depth)
    branches = [partial(_blocks_dot, w_CKL=array) for array in stack.arrays]
    first = jnp.int32(layer) * stack.per_layer

    def piece(number: ArrayLike) -> jax.Array:
        return _mapped(lambda x_RK: lax.switch(first + number, branches, x_RK), x_GRK)

    out_PGCRL = _mapped(piece, jnp.arange(stack.per_layer, dtype=jnp.int32))
    out_RN = einops.rearrange(out_PGCRL, "P G C R L -> (G R) (P C L)")
    return out_RN[:rows, : stack.num_columns]


def _blocks_dot(x_RK: jax.Array, *, w_CKL: jax.Array) -> jax.Array:
    x_CRK = jnp.broadcast_to(x_RK, (len(w_CKL), *x_RK.shape))
    return product(x_CRK, w_CKL, ((2,), (1,)), ((0,), (0,)), compute_dtype=x_RK.dtype)


def _mapped(function: Callable[..., jax.Array], over: jax.Array) -> jax.Array:
    """`lax.map`, without a loop where there is one entry."""
    return function(over[0])[None] if len(over) == 1 else lax.map(function, over)


def _floats(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def _widened(bits: jax.Array) -> jax.Array:
    """The fp32 values of bf16 bits."""
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
