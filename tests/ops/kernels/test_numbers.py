"""The kernels' exp, near to that of fp64."""

import numpy as np
import pytest

from jaxdist.ops import kernels

if not kernels.available():
    pytest.skip(
        "no numba, or no AVX2: XLA's twins run, and are tested, instead", allow_module_level=True
    )

from jaxdist.ops.kernels.numbers import exp


def test_exp_is_exact_to_a_unit_in_the_last_place():
    numbers = -np.geomspace(1e-8, 86.9, 5000, dtype=np.float32)
    found = np.array([exp(x) for x in (*numbers, np.float32(0))], np.float32)
    expected = np.exp(np.append(numbers, np.float32(0)).astype(np.float64))
    assert np.abs(found - expected).max() < 2**-23
    assert (np.abs(found - expected) <= 1.1 * np.spacing(expected.astype(np.float32))).all()


def test_far_below_there_is_nothing():
    assert [exp(np.float32(x)) for x in (-87, -1e4, -1e30, -3e38, -np.inf)] == [0] * 5
