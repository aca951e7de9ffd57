"""The head of a GGUF file: metadata and tensor table, every number checked before it is used.

A file from the network is not trusted. Each count, length and offset is compared with the bytes
that are there before anything is allocated or followed, so a damaged or hostile file costs one
error and no memory. Tensor data is only mapped. Source: the GGUF specification (ggml,
docs/gguf.md).
"""

import math
import struct
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, overload

import numpy as np

from jaxdist.config.errors import UsageError
from jaxdist.quantization.gguf_types import BLOCK_TYPES, BlockType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
# Limits far above what any model has, which bound the work that a small file can ask for.
MAX_ENTRIES = 1 << 16  # keys, and tensors
MAX_STRINGS = 1 << 22  # of one array
MAX_KEY_BYTES = 1 << 10
MAX_NAME_BYTES = 64  # of a tensor; ggml's own limit
MAX_DIMS = 4
# The smallest bytes an entry can take: what a count may promise is bounded by the file's length.
MIN_KEY_BYTES = 8 + 4 + 1  # length of the key, type, a one-byte value
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # length of the name, rank, one dim, type, offset

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "B"}
SCALARS |= {10: "Q", 11: "q", 12: "d"}  # number of the type -> struct's letter

Value = bool | int | float | str | np.ndarray | Sequence[str]


class Strings(Sequence[str]):
    """An array of strings left in the file and decoded when read."""

    def __init__(self, data: memoryview, spans: "array[int]", fail: Callable[[str], NoReturn]):
        self._data, self._spans, self._fail = data, spans, fail

    def __len__(self) -> int:
        return len(self._spans) // 2

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        first = 2 * (index % len(self))
        try:
            return str(self._data[self._spans[first] : self._spans[first + 1]], "utf-8")
        except UnicodeDecodeError:
            self._fail(f"string {index} is not UTF-8")


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """Where a tensor lies. `shape` is numpy's order: the last dim is contiguous in blocks."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """What a file says of itself, and its mapped bytes."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    data: np.ndarray  # [bytes of the file] uint8, mapped read-only

    def raw(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, [..., bytes of a row] uint8, without a copy."""
        info = self.tensors[name]
        flat = self.data[info.offset : info.offset + info.num_bytes]
        return flat.reshape(*info.shape[:-1], -1)


def read_header(path: Path) -> GGUFHeader:
    """Read the head of a GGUF file.

    Raises UsageError, naming file, field and rule, for whatever is not a well-formed little-endian
    GGUF file of version 2 or 3 that holds the data of all of its tensors.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    if path.stat().st_size < len(MAGIC) + 20:
        raise UsageError(f"{path}: {path.stat().st_size} bytes are too few for a GGUF file")
    data = np.memmap(path, np.uint8, mode="r")
    cursor = _Cursor(data.data, path)
    if cursor.data[:4] != MAGIC:
        cursor.fail("magic", f"{bytes(cursor.data[:4])!r} is not {MAGIC!r}: not a GGUF file")
    cursor.position = 4
    version = cursor.number("I", "version")
    if version not in VERSIONS:
        big = version & 0xFFFF == 0
        why = "the file is big-endian" if big else "write it again with a newer llama.cpp"
        cursor.fail("version", f"{version} is not one of {VERSIONS}; {why}")
    num_tensors = cursor.count("tensor count", MIN_TENSOR_BYTES, MAX_ENTRIES)
    num_keys = cursor.count("key count", MIN_KEY_BYTES, MAX_ENTRIES)
    metadata = _read_metadata(cursor, num_keys)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        cursor.fail("general.alignment", f"{alignment!r} is not a power of two")
    tensors = _read_tensors(cursor, num_tensors, alignment)
    return GGUFHeader(path=path, metadata=metadata, tensors=tensors, data=data)


class _Cursor:
    """A position in the mapped bytes that cannot leave them."""

    def __init__(self, data: memoryview, path: Path):
        self.data, self.path, self.position = data, path, 0

    def fail(self, field: str, rule: str) -> NoReturn:
        raise UsageError(f"{self.path}: {field}: {rule}")

    @property
    def left(self) -> int:
        return len(self.data) - self.position

    def skip(self, num_bytes: int, field: str) -> int:
        """Where `num_bytes` bytes begin that were stepped over."""
        if num_bytes > self.left:
            self.fail(field, f"takes {num_bytes} bytes where {self.left} are left; truncated?")
        start = self.position
        self.position += num_bytes
        return start

    def number(self, letter: str, field: str) -> Any:
        start = self.skip(struct.calcsize(f"<{letter}"), field)
        return struct.unpack_from(f"<{letter}", self.data, start)[0]

    def count(self, field: str, min_bytes: int, limit: int) -> int:
        """A number of things of at least `min_bytes` bytes each, all still to come."""
        count = self.number("Q", field)
        if count > limit:
            self.fail(field, f"{count} is more than {limit}")
        if count * min_bytes > self.left:
            self.fail(field, f"{count} do not fit in the {self.left} bytes left; truncated?")
        return count

    def string(self, field: str, limit: int | None = None) -> str:
        length = self.number("Q", field)
        if limit is not None and length > limit:
            self.fail(field, f"a length of {length} bytes is over {limit}")
        start = self.skip(length, field)
        try:
            return str(self.data[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(field, "is not UTF-8")


def _read_metadata(cursor: _Cursor, num_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for index in range(num_keys):
        key = cursor.string(f"key {index}", MAX_KEY_BYTES)
        if key in metadata:
            cursor.fail(f"key {key!r}", "occurs twice")
        metadata[key] = _read_value(cursor, key if key.isprintable() else repr(key))
    return metadata


def _read_value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("I", key)
    if kind == STRING:
        return cursor.string(key)
    if kind == ARRAY:
        return _read_array(cursor, key)
    if kind not in SCALARS:
        cursor.fail(key, f"type {kind} is unknown")
    value = cursor.number(SCALARS[kind], key)
    if kind != BOOL:
        return value
    if value > 1:
        cursor.fail(key, f"{value} is neither true (1) nor false (0)")
    return bool(value)


def _read_array(cursor: _Cursor, key: str) -> Value:
    kind = cursor.number("I", key)
    if kind == STRING:
        return _read_strings(cursor, key)
    if kind not in SCALARS:
        cursor.fail(key, f"an array of type {kind} is neither of numbers nor of strings")
    dtype = np.dtype(SCALARS[kind]).newbyteorder("<")
    count = cursor.count(key, dtype.itemsize, len(cursor.data))
    start = cursor.skip(count * dtype.itemsize, key)
    values = np.frombuffer(cursor.data, dtype, count, start)
    if kind != BOOL:
        return values
    if count and values.max() > 1:
        cursor.fail(key, "holds bytes that are neither true (1) nor false (0)")
    return values.astype(np.bool_)


def _read_strings(cursor: _Cursor, key: str) -> Strings:
    def fail(rule: str) -> NoReturn:
        cursor.fail(key, rule)

    count = cursor.count(key, 8, MAX_STRINGS)
    data, end, unpack = cursor.data, len(cursor.data), struct.Struct("<Q").unpack_from
    spans, position = array("q"), cursor.position
    for index in range(count):  # plain arithmetic: vocabularies have 10^5 strings
        start = position + 8
        if start > end or (position := start + unpack(data, start - 8)[0]) > end:
            fail(f"string {index} reaches beyond the end of the file; truncated?")
        spans.append(start)
        spans.append(position)
    cursor.position = position
    return Strings(data, spans, fail)


def _read_tensors(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        info = _read_tensor(cursor, index, alignment)
        if info.name in found:
            cursor.fail(f"tensor {info.name!r}", "occurs twice")
        found[info.name] = info
    # Offsets count from the first aligned byte after the table.
    base = -(-cursor.position // alignment) * alignment
    size, end, before = len(cursor.data), 0, ""
    for info in sorted(found.values(), key=lambda info: info.offset):
        field = f"tensor {info.name!r}"
        if info.offset < end:
            cursor.fail(field, f"overlaps tensor {before!r}")
        end, before = info.offset + info.num_bytes, info.name
        if base + end > size:
            missing = base + end - size
            cursor.fail(field, f"ends {missing} bytes beyond the end of the file; truncated?")
    return {name: replace(info, offset=base + info.offset) for name, info in found.items()}


def _read_tensor(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    name = cursor.string(f"name of tensor {index}", MAX_NAME_BYTES)
    field = f"tensor {name!r}"
    rank = cursor.number("I", field)
    if not 1 <= rank <= MAX_DIMS:
        cursor.fail(field, f"{rank} dims are not 1 to {MAX_DIMS}")
    dims = [cursor.number("Q", field) for _ in range(rank)]
    number, offset = cursor.number("I", field), cursor.number("Q", field)
    if number not in BLOCK_TYPES:
        cursor.fail(field, f"type {number} is unknown")
    block_type = BLOCK_TYPES[number]
    if 0 in dims or dims[0] % block_type.block_size:
        rule = f"a positive multiple of {block_type.name}'s block of {block_type.block_size}"
        cursor.fail(field, f"dims {dims} do not begin with {rule}")
    if offset % alignment:
        cursor.fail(field, f"offset {offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(
        name=name,
        shape=tuple(reversed(dims)),
        type=block_type,
        offset=offset,
        num_bytes=math.prod(dims) // block_type.block_size * block_type.num_bytes,
    )
