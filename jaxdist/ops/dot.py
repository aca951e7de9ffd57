"""The matrix product of every linear layer.

Shapes: x [..., K] is the activation, w [K, N] the master weight, the result [..., N].
"""

from functools import partial

import jax
from jax.typing import DTypeLike

from jaxdist.ops.product import product


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(x: jax.Array, w: jax.Array, compute_dtype: DTypeLike) -> jax.Array:
    """x [..., K] @ w [K, N] -> [..., N] in `compute_dtype`, accumulated in fp32.

    The gradient of w stays as accumulated: it is never rounded to `compute_dtype`. What the
    backward pass keeps is x and w themselves, no copy of either.
    """
    return product(x, w, ((x.ndim - 1,), (0,)), compute_dtype=compute_dtype).astype(compute_dtype)


def _forward(
    x: jax.Array, w: jax.Array, compute_dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dot(x, w, compute_dtype), (x, w)


def _backward(
    compute_dtype: DTypeLike, kept: tuple[jax.Array, jax.Array], dout: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    leading = tuple(range(x.ndim - 1))
    dx = product(dout, w, ((x.ndim - 1,), (1,)), compute_dtype=compute_dtype)
    dw = product(x, dout, (leading, leading), compute_dtype=compute_dtype)
    return dx.astype(x.dtype), dw.astype(w.dtype)


dot.defvjp(_forward, _backward)
