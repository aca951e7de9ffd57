"""Writing a Hugging Face folder, under a temporary name until it is whole."""

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.json_text import read_object
from jaxdist.interop.huggingface.config import write_config
from jaxdist.interop.huggingface.families import FAMILIES
from jaxdist.interop.huggingface.folder import CONFIG
from jaxdist.interop.huggingface.places import Place, places, tensor_shapes
from jaxdist.interop.huggingface.safetensors_write import make_safetensors
from jaxdist.interop.leaves import TABLES

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}
MAX_SHARD_BYTES = 5_000_000_000


def write_huggingface(
    folder: str | Path,
    config: ModelConfig,
    weights: Iterable[tuple[str, int | None, Any]],
    *,
    dtype: str = "float32",
    companions: Mapping[str, bytes] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model; a folder that was there is replaced once the new one is whole.

    Args:
        folder: Where to.
        config: The model's shape.
        weights: (our name, layer or None, array) in any order; tables may have the rows that pad
            the vocabulary, which are not written.
        dtype: One of `DTYPES`.
        companions: Small files by name: those of the tokenizer, generation_config.json, and the
            config.json that the model came with, from which its tokens are kept.
        max_shard_bytes: Of one file's weights.

    Raises:
        UsageError: For a dtype, config or weight that cannot be written, named.
    """
    folder = Path(folder).expanduser()
    check_dtype(dtype)
    files = dict(companions or {})
    before = {name: files.get(name, b"{}") for name in ("generation_config.json", CONFIG)}
    files.pop(CONFIG, None)
    generation, own = (read_object(text, f"{n} of the model") for n, text in before.items())
    origin = {**generation, **own}
    values = write_config(config, dtype, origin)
    family = FAMILIES[values["architectures"][0]]
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        unfinished.mkdir(parents=True)
        views = make_safetensors(
            unfinished, tensor_shapes(family, config), DTYPES[dtype], max_shard_bytes
        )
        _fill(views, places(family, config), config, weights)
        for name, content in {CONFIG: _json(values), **files}.items():
            (unfinished / name).write_bytes(content)
        del views
        for path in unfinished.iterdir():
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
        replace_folder(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_dtype(dtype: str) -> None:
    """Refuse a dtype that cannot be written."""
    if dtype not in DTYPES:
        hint = did_you_mean(dtype, DTYPES)
        raise UsageError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}{hint}")


def replace_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`; what was there is gone afterwards, and not before."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _fill(
    views: Mapping[str, np.ndarray],
    where: Mapping[str, Place],
    config: ModelConfig,
    weights: Iterable[tuple[str, int | None, Any]],
) -> None:
    wanted = {(name, layer) for name, place in where.items() for layer in place.layers}
    for name, layer, array in weights:
        label = name if layer is None else f"{name} of layer {layer}"
        if (name, layer) not in wanted:
            raise UsageError(f"the weight {label} is not part of the model, or came twice")
        wanted.remove((name, layer))
        place = where[name]
        if name in TABLES:
            array = array[: config.vocab_size]
        own, tensors = slice(place.start, place.stop), place.tensors(layer)
        whole = np.asarray(array)
        parts = whole if place.num_experts else whole[None]
        if len(parts) != len(tensors):
            raise UsageError(
                f"the weight {label} is of {len(parts)} experts, expected {len(tensors)}"
            )
        for name_there, part in zip(tensors, parts, strict=True):
            tensor, values = views[name_there], part.T if place.transposed else part
            target = tensor[own] if place.outputs_first else tensor[..., own]
            if values.shape != target.shape:
                raise UsageError(
                    f"the weight {label} has shape {values.shape}, expected {target.shape}"
                )
            np.copyto(target, values, casting="unsafe")
    if wanted:
        name, layer = min(wanted, key=str)
        label = name if layer is None else f"{name} of layer {layer}"
        raise UsageError(f"{len(wanted)} weights of the model are missing, among them {label}")


def _json(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()
