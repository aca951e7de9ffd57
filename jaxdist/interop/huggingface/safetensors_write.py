"""Writing safetensors: files of at most a given size and their index, filled tensor by tensor."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.interop.huggingface.safetensors_file import INDEX, NAMES, SINGLE


def make_safetensors(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any], max_bytes: int
) -> dict[str, np.ndarray]:
    """Make the files for tensors of these shapes; a writable view of each, to be filled.

    Args:
        folder: Where to; it holds no safetensors yet.
        shapes: By tensor, in the order in which they will lie.
        dtype: Of all of them.
        max_bytes: Of a file's data; a larger tensor has a file of its own.

    Raises:
        OSError: The disk is full. Space is taken here, so that filling a view cannot fail.
    """
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    files: list[list[str]] = [[]]
    for name, size in sizes.items():
        if files[-1] and sum(sizes[other] for other in files[-1]) + size > max_bytes:
            files.append([])
        files[-1].append(name)
    views, weight_map = {}, {}
    for number, names in enumerate(files, 1):
        several = len(files) > 1
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if several else SINGLE
        views |= _make_file(folder / file, {name: shapes[name] for name in names}, dtype)
        weight_map |= dict.fromkeys(names, file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return views


def _make_file(
    path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: np.dtype[Any]
) -> dict[str, np.ndarray]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data are aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
        else:
            file.truncate(8 + len(text) + end)
    data = np.memmap(path, np.uint8, "r+")
    views = {}
    for name, shape in shapes.items():
        start, stop = header[name]["data_offsets"]
        part = data[8 + len(text) + start : 8 + len(text) + stop]
        views[name] = part.view(dtype).reshape(shape)
    return views
