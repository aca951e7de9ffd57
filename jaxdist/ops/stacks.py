"""Reading and writing one entry of a stacked array at a traced index, in place where XLA can.

Indices are ours and never negative, so none of the wrapping that `x[i]` compiles to is needed.
"""

import jax
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike


def read(stack: Array, *indices: ArrayLike) -> Array:
    """stack[i, j, ...], without the indexed dims."""
    count = len(indices)
    sizes = (1,) * count + stack.shape[count:]
    entry = lax.dynamic_slice(stack, _starts(stack, indices), sizes, allow_negative_indices=False)
    return lax.squeeze(entry, range(count))


def write(stack: Array, entry: Array, *indices: ArrayLike) -> Array:
    """`stack` with stack[i, j, ...] = entry."""
    entry = lax.expand_dims(entry, range(len(indices)))
    return lax.dynamic_update_slice(
        stack, entry, _starts(stack, indices), allow_negative_indices=False
    )


def as_bits(x: Array) -> Array:
    """16-bit floats as their bits, anything else as it is; moves no data.

    XLA:CPU updates a stack of bf16 by way of fp32: it converts the whole of it, and back.
    """
    dtype = bits_dtype(x.dtype)
    return x if dtype == x.dtype else lax.bitcast_convert_type(x, dtype)


def bits_dtype(dtype: jax.numpy.dtype) -> jax.numpy.dtype:
    """The dtype of `as_bits`."""
    is_half = dtype.itemsize == 2 and jax.numpy.issubdtype(dtype, jax.numpy.floating)
    return jax.numpy.dtype("uint16") if is_half else dtype


def from_bits(bits: Array, dtype: DTypeLike) -> Array:
    """What `as_bits` was given, of this dtype."""
    return bits if bits.dtype == dtype else lax.bitcast_convert_type(bits, dtype)


def _starts(stack: Array, indices: tuple[ArrayLike, ...]) -> tuple[ArrayLike, ...]:
    zeros = (0,) * (stack.ndim - len(indices))
    return tuple(map(_int32, (*indices, *zeros)))


def _int32(index: ArrayLike) -> ArrayLike:
    """Numbers stay numbers, which are traced sooner than arrays."""
    return index.astype("int32") if isinstance(index, Array) else np.asarray(index, np.int32)
