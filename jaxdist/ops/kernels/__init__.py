"""Operations for CPUs that numba compiles where XLA:CPU has no good kernel of its own.

Each has a twin that XLA compiles, which runs where a kernel cannot and which tests compare it with.
"""

import functools
from importlib.util import find_spec
from typing import Any

import jax


@functools.cache
def available() -> bool:
    """Whether kernels run here: numba is installed, XLA calls as they expect, and the processor
    has AVX2 and FMA.
    """
    if find_spec("numba") is None:
        return False
    from jaxdist.ops.kernels.calls import MAJOR, installed_version
    from jaxdist.ops.kernels.tiles import features

    return installed_version()[0] == MAJOR and {"avx2", "fma"} <= features()


def multiply(*arguments: Any) -> jax.Array:
    """`product.multiply`. Like the others here, it loads numba when it is first called."""
    from jaxdist.ops.kernels import product

    return product.multiply(*arguments)


def write_pages(*arguments: Any, **options: Any) -> Any:
    """`paged_attention.write_pages`."""
    from jaxdist.ops.kernels import paged_attention

    return paged_attention.write_pages(*arguments, **options)


def attend(*arguments: Any, **options: Any) -> jax.Array:
    """`paged_attention.paged_attention`."""
    from jaxdist.ops.kernels import paged_attention

    return paged_attention.paged_attention(*arguments, **options)
