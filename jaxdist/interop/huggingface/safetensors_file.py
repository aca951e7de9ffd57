"""Reading safetensors files, single or indexed, as views that cost nothing until they are copied.

A file is 8 bytes of header length (little endian), a JSON header that names each tensor's dtype,
shape and byte range, and the data. Files come from anywhere, so the header is held against the
file's size before anything is made of it. Source of the format: the safetensors README.
"""

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from jaxdist.config.errors import UsageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER = 100_000_000  # bytes, the limit of the format's own library


def read_json(path: Path, largest: int = LARGEST_HEADER) -> dict[str, Any]:
    """The JSON object in a file of at most `largest` bytes; UsageError where there is none."""
    try:
        if path.stat().st_size > largest:
            raise UsageError(f"{path}: more than {largest} bytes of JSON")
        return _object(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def open_safetensors(folder: Path) -> Mapping[str, np.ndarray]:
    """Every tensor of a folder by its name, as a read-only view of the mapped file.

    The files are those of the index, else `model.safetensors`, else all there are. UsageError,
    naming file and rule, where one is missing, damaged, or does not hold what the index says.
    """
    tensors: dict[str, np.ndarray] = {}
    places: dict[str, str] = {}
    index = _index(folder)
    for name in sorted(set(index.values())) or _files(folder):
        for tensor, view in _views(folder / name):
            if tensor in tensors:
                raise UsageError(f"{folder}: {tensor!r} is in both {places[tensor]} and {name}")
            tensors[tensor], places[tensor] = view, name
    for tensor, name in index.items():
        if places.get(tensor) != name:
            raise UsageError(f"{folder / INDEX}: {tensor!r} is not in {name}, where it should be")
    return tensors


def _index(folder: Path) -> dict[str, str]:
    """Tensor -> file; empty where there is no index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UsageError(f"{path}: weight_map is missing or names no file")
    for tensor, name in weight_map.items():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise UsageError(f"{path}: {tensor!r} is said to be in {name!r}, which is no file here")
        if not (folder / name).is_file():
            raise UsageError(f"{path}: {name} is missing from the folder")
    return weight_map


def _files(folder: Path) -> list[str]:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE in found:
        return [SINGLE]
    if not found:
        others = sorted(
            path.name for pattern in ("*.bin", "*.pt*") for path in folder.glob(pattern)
        )
        hint = f", only {others[0]}; save it again with transformers" if others else ""
        raise UsageError(f"{folder} holds no *.safetensors{hint}")
    return found


@dataclass(frozen=True)
class _Entry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # bytes from the start of the data
    stop: int


def _views(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    size = path.stat().st_size
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\xff"))
        if length > min(size - 8, LARGEST_HEADER):
            _fail(path, "is cut short, or no safetensors file: its header ends after the file")
        header = _object(file.read(length), str(path))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for entry in _entries(path, header, size - 8 - length):
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            known = ", ".join(DTYPES)
            _fail(path, f"holds {entry.name!r} as {entry.dtype}, which is not one of {known}")
        count = math.prod(entry.shape)
        view = np.frombuffer(mapped, dtype, count, 8 + length + entry.start)
        yield entry.name, view.reshape(entry.shape)


def _entries(path: Path, header: dict[str, Any], size: int) -> list[_Entry]:
    """The tensors in the order of their data, which they must fill without gap or overlap."""
    header.pop("__metadata__", None)
    entries = sorted(
        (_entry(path, name, value) for name, value in header.items()),
        key=lambda entry: (entry.start, entry.stop),
    )
    end = 0
    for entry in entries:
        if entry.start != end:
            _fail(path, f"has a gap or an overlap of data before {entry.name!r}")
        end = entry.stop
    if end != size:
        _fail(path, f"is cut short or too long: {size} bytes of data where {end} were announced")
    return entries


def _entry(path: Path, name: str, value: Any) -> _Entry:
    fields: dict[str, Any] = value if isinstance(value, dict) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    sound = isinstance(dtype, str) and _are_sizes(shape) and _are_sizes(offsets)
    if not sound or len(offsets) != 2 or len(shape) > 8:
        _fail(path, f"has no sound dtype, shape and data_offsets for {name[:80]!r}")
    start, stop = offsets
    if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        _fail(path, f"gives {name[:80]!r} {stop - start} bytes, which shape {shape} does not fill")
    return _Entry(name, dtype, tuple(shape), start, stop)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 2**62 for v in values
    )


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where}: its JSON is damaged ({str(error)[:100]})") from None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: its JSON is no object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name comes twice")
    return made


def _fail(path: Path, what: str) -> NoReturn:
    raise UsageError(f"{path} {what}")
