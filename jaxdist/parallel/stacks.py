"""Reading and writing one entry of a stacked array at a traced index, in place where XLA can.

Indices are ours and never negative, so none of the wrapping that `x[i]` compiles to is needed.
"""

import jax
from jax import Array, lax
from jax.typing import ArrayLike


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


def _starts(stack: Array, indices: tuple[ArrayLike, ...]) -> tuple[Array, ...]:
    zeros = (0,) * (stack.ndim - len(indices))
    return tuple(jax.numpy.asarray(index, "int32") for index in (*indices, *zeros))
