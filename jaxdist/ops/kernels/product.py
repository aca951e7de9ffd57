"""x times a layer's weight that lies in blocks of `lanes` columns."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdist.ops.kernels.calls import call, compiled, half_word, operand, result, size
from jaxdist.ops.kernels.tiles import COLUMNS, Kind, features, strip, vector_size


def multiply(x_RK: jax.Array, stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    """x [R, K] of bf16 or fp32 @ layer `layer` of a stack of blocks -> fp32 [R, C * lanes].

    stack: fp32 [L, C, K, lanes], or pairs of bf16 in 32 bits [L, C, K / 2, lanes].
    """
    _, num_blocks, _, lanes = stack.shape
    kind: Kind = "widened"
    if stack.dtype == jnp.float32:
        kind = "fp32"
    elif x_RK.dtype == jnp.bfloat16 and "avx512bf16" in features():
        kind = "bf16"
    if kind != "bf16":
        x_RK = x_RK.astype(jnp.float32)
    out = jax.ShapeDtypeStruct((len(x_RK), num_blocks * lanes), jnp.float32)
    index = jnp.asarray(layer, jnp.int32).reshape(1)
    return call(_operation(kind, vector_size()), [out], x_RK, stack, index)[0]


@functools.cache
def _operation(kind: Kind, num_lanes: int) -> Callable[[int], None]:
    multiply_strip = strip(kind, num_lanes)
    x_size, step = (2, 2) if kind == "bf16" else (4, 2 if kind == "widened" else 1)

    def product(frame: int) -> None:
        x, out = operand(frame, 0), result(frame, 0)
        rows, depth = size(frame, 0, 0), size(frame, 0, 1)
        num_blocks, lanes = size(frame, 1, 1), size(frame, 1, 3)
        x_row, w_row, out_row = x_size * depth, 4 * lanes, 4 * lanes * num_blocks
        block_bytes = w_row * (depth // step)
        w = operand(frame, 1) + half_word(operand(frame, 2)) * num_blocks * block_bytes
        for block in range(num_blocks):
            for first in range(0, lanes, COLUMNS):
                w_here = w + block * block_bytes + 4 * first
                out_here = out + 4 * (block * lanes + first)
                multiply_strip(x, w_here, out_here, rows, depth, x_row, w_row, out_row)

    product.__name__ = f"product_{kind}_{num_lanes}"
    return compiled(product)
