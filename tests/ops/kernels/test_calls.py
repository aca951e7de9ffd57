"""An operation is registered once, whatever threads trace it first."""

import threading

import jax
import jax.numpy as jnp
import pytest

from jaxdist.ops import kernels

if not kernels.available():
    pytest.skip(
        "no numba, or no AVX2: XLA's twins run, and are tested, instead", allow_module_level=True
    )

from jaxdist.ops.kernels.product import _operation, multiply


def test_threads_may_trace_at_a_time():
    _operation.cache_clear()
    errors = []

    def trace():
        try:
            jax.jit(multiply)(jnp.ones((2, 8)), jnp.ones((1, 1, 8, 64)), 0).block_until_ready()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=trace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
