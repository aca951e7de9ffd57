"""Operations for CPUs that numba compiles where XLA:CPU has no good kernel of its own.

Each has a twin that XLA compiles, which runs where a kernel cannot and which tests compare it with.
numba is loaded by who asks whether there are kernels, and only on a CPU.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxdist.ops import paged_attention as plain
from jaxdist.ops.paged_attention import Pages, Rows


@functools.cache
def available() -> bool:
    """Whether kernels run here: numba can be loaded, XLA calls as they expect, and the processor
    has AVX2 and FMA.
    """
    try:
        from jaxdist.ops.kernels.calls import MAJOR, installed_version
        from jaxdist.ops.kernels.tiles import features
    except ImportError:  # it is not there, or not for this NumPy
        return False
    version = installed_version()
    return version is not None and version[0] == MAJOR and {"avx2", "fma"} <= features()


def multiply(x_RK: jax.Array, stack: jax.Array, layer: jax.Array | int) -> jax.Array:
    """`product.multiply`."""
    from jaxdist.ops.kernels import product

    return product.multiply(x_RK, stack, layer)


def write_pages(
    pages: Pages, k_BTKH: jax.Array, v_BTKH: jax.Array, rows: Rows, *, dtype: DTypeLike
) -> Pages:
    """As `ops.paged_attention.write_pages`, in place; keys lie by column."""
    if not _has_kernel(pages, dtype):
        return plain.write_pages(pages, k_BTKH, v_BTKH, rows, dtype=dtype, key_page="k h c")
    from jaxdist.ops.kernels import paged_attention

    return paged_attention.write_pages(pages, k_BTKH, v_BTKH, rows)


def attend(
    q_BTNH: jax.Array, pages: Pages, rows: Rows, *, dtype: DTypeLike, **scores: Any
) -> jax.Array:
    """As `ops.paged_attention.paged_attention`; keys lie by column."""
    if not _has_kernel(pages, dtype):
        return plain.paged_attention(q_BTNH, pages, rows, dtype=dtype, key_page="k h c", **scores)
    from jaxdist.ops.kernels import paged_attention

    return paged_attention.paged_attention(q_BTNH, pages, rows, **scores)


def _has_kernel(pages: Pages, dtype: DTypeLike) -> bool:
    """bf16 as bits, or fp32."""
    is_bf16 = pages.keys.dtype == jnp.uint16 and jnp.dtype(dtype) == jnp.bfloat16
    return is_bf16 or pages.keys.dtype == jnp.float32
