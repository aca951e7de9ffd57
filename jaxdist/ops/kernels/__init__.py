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
    """`product.multiply`; numba is loaded by who multiplies."""
    from jaxdist.ops.kernels.product import multiply

    return multiply(*arguments)
