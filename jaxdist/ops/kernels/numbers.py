"""Numbers as their bits, exp, and loops over numbers at an address, which become vectors."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from jaxdist.ops.kernels.calls import compiled, floats, intrinsic, njit


@intrinsic
def as_float(typing: Any, bits: Any) -> Any:
    """The fp32 number of 32 bits."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), code


@intrinsic
def as_bits(typing: Any, number: Any) -> Any:
    """The 32 bits of an fp32 number."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), code


@compiled
def from_bf16(bits: Any) -> Any:
    """The fp32 number of bf16's bits."""
    return as_float(np.uint32(bits) << np.uint32(16))


@compiled
def to_bf16(number: Any) -> Any:
    """bf16's bits, rounded to the nearest, to even ones of two; 0 of what is not finite."""
    bits = as_bits(number)
    if bits & np.uint32(0x7F800000) == np.uint32(0x7F800000):
        return np.uint16(0)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


_fused = njit(nogil=True, error_model="numpy", fastmath={"contract"})


@_fused
def exp(x: Any) -> Any:
    """e**x for x <= 0, within a unit in the last place; 0 from -87 down.

    2**n times the Taylor polynomial of what is left, at most half of log 2.
    """
    shifted = x * np.float32(1.44269504) + np.float32(12582912.0)  # 1.5 * 2**23 rounds
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1 / 5040)
    p = p * r + np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    p = p * r + np.float32(1)
    power = as_float((np.uint32(np.int32(n) + np.int32(127))) << np.uint32(23))
    return p * power if x > np.float32(-87) else np.float32(0)


@compiled
def clear(address: int, count: int) -> None:
    """Zeros."""
    numbers = floats(address, count)
    for i in range(count):
        numbers[i] = 0


@compiled
def put(address: int, factor: Any, source: int, count: int) -> None:
    """source * factor."""
    numbers, given = floats(address, count), floats(source, count)
    for i in range(count):
        numbers[i] = given[i] * factor


@_fused
def add(address: int, factor: Any, source: int, count: int) -> None:
    """What is there * factor + source."""
    numbers, given = floats(address, count), floats(source, count)
    for i in range(count):
        numbers[i] = numbers[i] * factor + given[i]
