"""Python functions, compiled by numba, as operations of an XLA program.

XLA calls an operation with the address of a frame (xla/ffi/api/c_api.h, version 0 of the typed
FFI), which says where its operands and results lie. A frame may also ask which version was meant:
minor ones only add to what is there, so that it is the one that is installed.
"""

import ctypes
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types

from jaxdist.ops.kernels.machine_code import MachineCode, load

# Any, for what numba decorates is called in other ways than it is written.
_numba: Any = numba
intrinsic, njit = _numba.extending.intrinsic, _numba.njit

MAJOR = 0
# Bytes from the start of each structure.
_EXTENSION, _ARGUMENTS, _RESULTS = 8, 72, 112  # of a frame
_KIND, _METADATA = 8, 24  # of an extension
_MAJOR, _MINOR = 24, 28  # of metadata
_DATA, _DIMS = 24, 40  # of a buffer
_ASKS_VERSION = 1  # kind of an extension


def installed_version() -> tuple[int, int] | None:
    """Major and minor version of the FFI of this XLA; None where it does not say."""
    try:
        header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    except OSError:
        return None
    major, minor = (
        re.search(rf"#define XLA_FFI_API_{name} (\d+)", header) for name in ("MAJOR", "MINOR")
    )
    return None if major is None or minor is None else (int(major[1]), int(minor[1]))


_INSTALLED_MINOR = (installed_version() or (MAJOR, 0))[1]
compiled = njit(nogil=True, error_model="numpy", boundscheck=False)


def _integer_at(bits: int, kind: Any) -> Any:
    @intrinsic
    def integer(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer()))

        return kind(types.int64), code

    return integer


word, half_word = _integer_at(64, types.int64), _integer_at(32, types.int32)  # at an address


@intrinsic
def put_half_word(typing: Any, address: Any, value: Any) -> Any:
    """Write a 32-bit integer to an address."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, value = arguments
        builder.store(value, builder.inttoptr(address, ir.IntType(32).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int32), code


@intrinsic
def _pointer(typing: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), code


@compiled
def floats(address: int, shape: Any) -> Any:
    """The fp32 numbers at an address as an array of this shape."""
    return _numba.carray(_pointer(address), shape, np.float32)


@compiled
def integers(address: int, shape: Any) -> Any:
    """Likewise of 32-bit integers."""
    return _numba.carray(_pointer(address), shape, np.int32)


@compiled
def halves(address: int, shape: Any) -> Any:
    """Likewise of 16 bits."""
    return _numba.carray(_pointer(address), shape, np.uint16)


@compiled
def operand(frame: int, number: int) -> int:
    """Address of an operand's numbers."""
    return word(word(word(frame + _ARGUMENTS) + 8 * number) + _DATA)


@compiled
def size(frame: int, number: int, dim: int) -> int:
    """Of an operand's dim."""
    return word(word(word(word(frame + _ARGUMENTS) + 8 * number) + _DIMS) + 8 * dim)


@compiled
def result(frame: int, number: int) -> int:
    """Address of a result's numbers."""
    return word(word(word(frame + _RESULTS) + 8 * number) + _DATA)


@compiled
def _answers_version(frame: int) -> bool:
    extension = word(frame + _EXTENSION)
    if extension == 0 or half_word(extension + _KIND) != _ASKS_VERSION:
        return False
    metadata = word(extension + _METADATA)
    put_half_word(metadata + _MAJOR, MAJOR)
    put_half_word(metadata + _MINOR, _INSTALLED_MINOR)
    return True


def _registered(operation: Callable[[int], None]) -> str:
    """The name under which XLA knows it; once for each name, whatever threads trace it."""
    name = f"jaxdist_{operation.__name__}"
    with _REGISTERING:
        if name not in _ENTRIES:
            _ENTRIES[name] = _register(name, operation)
    return name


def _register(name: str, operation: Callable[[int], None]) -> MachineCode:
    def entry(frame: int) -> int:
        if not _answers_version(frame):
            operation(frame)
        return 0  # no error

    code = load(name, lambda: _numba.cfunc(types.int64(types.int64), nopython=True)(entry))
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address)
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(function), platform="cpu")
    return code


_ENTRIES: dict[str, MachineCode] = {}
_REGISTERING = threading.Lock()


def call(
    operation: Callable[[int], None],
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: jax.Array,
    in_place: dict[int, int] | None = None,
) -> Sequence[jax.Array]:
    """The results of a compiled `operation(frame)`; `in_place` maps operands to results."""
    name = _registered(operation)
    return jax.ffi.ffi_call(name, list(results), input_output_aliases=in_place)(*operands)
