"""Writing a GGUF file, one weight at a time, under a temporary name until it is whole."""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.interop.gguf import rope
from jaxdist.interop.gguf.architectures import ARCHITECTURES, Architecture
from jaxdist.interop.gguf.config import config_entries
from jaxdist.interop.gguf.fit import architecture_for, differing
from jaxdist.interop.gguf.header import DEFAULT_ALIGNMENT
from jaxdist.interop.gguf.places import HeadsApart, places, tensor_shapes
from jaxdist.interop.leaves import TABLES, leaf_shapes
from jaxdist.quantization.gguf_quantize import quantize
from jaxdist.quantization.gguf_types import BY_NAME, BlockType

# What may be written -> (block type, llama.cpp's number of the file type).
TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32)}
TYPES |= {"q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
TOKENS, TOKEN_TYPES, SCORES = (f"tokenizer.ggml.{k}" for k in ("tokens", "token_type", "scores"))
UNUSED = 5  # of tokenizer.ggml.token_type
EXACT = (".ffn_gate_inp.", "position_embd.")  # of all types: routers and positions stay F32

Weight = tuple[str, int | None, Any]  # our name, layer or None, array of ours


def write_gguf(
    path: str | Path,
    config: ModelConfig,
    weights: Iterable[Weight],
    *,
    gguf_type: str = "f16",
    tokenizer: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    preferred: str | None = None,
    name: str | None = None,
) -> None:
    """Write a model; what was at `path` is replaced once the new file is whole.

    Args:
        path: Where to.
        config: The model's shape.
        weights: (our name, layer or None, array) in any order, as `GGUFFile.weights` gives them;
            tables may have the rows that pad the vocabulary.
        gguf_type: One of `TYPES`. Vectors stay F32; rows that are no whole number of blocks
            become F16, as in llama.cpp.
        tokenizer: Metadata `tokenizer.*` by key, as `data.gguf_vocabulary` makes them.
        architecture: A name of `ARCHITECTURES`; by default one that fits the config.
        preferred: The name to take by default if it fits, such as Hugging Face's model_type.
        name: The model's name.

    Raises:
        UsageError: For a type, config, tokenizer or weight that cannot be written, named.
    """
    path = Path(path).expanduser()
    if gguf_type not in TYPES:
        hint = did_you_mean(gguf_type, TYPES)
        raise UsageError(f"GGUF type {gguf_type!r} is not one of {', '.join(TYPES)}{hint}")
    kind = _named(architecture, config) if architecture else architecture_for(config, preferred)
    factors = rope.rope_scaling_entries(config)[1]
    shapes = tensor_shapes(kind, config) | {k: v.shape for k, v in factors.items()}
    slots = _slots(shapes, BY_NAME[TYPES[gguf_type][0]])
    entries = {
        "general.type": "model",
        "general.name": name or path.stem,
        "general.file_type": TYPES[gguf_type][1],
        "general.quantization_version": 2,
        **config_entries(kind, config),
        **_vocabulary(tokenizer, config.vocab_size),
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        start = _write_head(unfinished, kind.name, entries, shapes, slots)
        with open(unfinished, "r+b") as file:
            file.truncate(start + max(end for _, end, _ in slots.values()))
            for tensor, values in factors.items():
                _write_tensor(file, start, tensor, values, slots)
            _write_weights(file, start, kind, config, weights, slots)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


Slots = dict[str, tuple[int, int, BlockType]]  # tensor -> first and last byte of the data, type


def _named(name: str, config: ModelConfig) -> Architecture:
    """The architecture of that name; UsageError where it cannot express the config."""
    if name not in ARCHITECTURES:
        raise UsageError(f"GGUF architecture {name!r} is not one of {', '.join(ARCHITECTURES)}")
    for key in differing(ARCHITECTURES[name], config):
        raise UsageError(
            f"model.{key}={getattr(config, key)} cannot be written as the GGUF architecture {name}"
        )
    return ARCHITECTURES[name]


def _slots(shapes: Mapping[str, tuple[int, ...]], wanted: BlockType) -> Slots:
    slots: Slots = {}
    start = 0
    for tensor, shape in shapes.items():
        block_type = wanted
        if len(shape) == 1 or any(part in tensor for part in EXACT):
            block_type = BY_NAME["F32"]
        elif shape[-1] % wanted.block_size:
            block_type = BY_NAME["F16"]
        num_blocks = int(np.prod(shape, dtype=np.int64)) // block_type.block_size
        end = start + num_blocks * block_type.num_bytes
        slots[tensor] = (start, end, block_type)
        start = -(-end // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
    return slots


def _write_head(
    path: Path,
    architecture: str,
    entries: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    slots: Slots,
) -> int:
    """Write everything before the data; where the data start."""
    try:
        import gguf
    except ImportError as error:
        raise UsageError("writing GGUF needs the package gguf: pip install gguf") from error
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in entries.items():
        _add(writer, key, value)
    for tensor, (start, end, block_type) in slots.items():
        number = gguf.GGMLQuantizationType(block_type.number)
        no_dtype = np.dtype(np.void)  # the number tells the type, and the shape counts weights
        writer.add_tensor_info(tensor, shapes[tensor], no_dtype, end - start, number)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    finally:
        writer.close()
    return -(-path.stat().st_size // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))


def _vocabulary(tokenizer: Mapping[str, Any] | None, vocab_size: int) -> dict[str, Any]:
    """The tokenizer's metadata with one token for every row of the embedding."""
    if tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    entries = dict(tokenizer)
    missing = vocab_size - len(entries[TOKENS])
    if missing < 0:
        raise UsageError(
            f"the tokenizer has {len(entries[TOKENS])} tokens, more than "
            f"model.vocab_size={vocab_size}"
        )
    entries[TOKENS] = [*entries[TOKENS], *(f"[PAD{vocab_size - n}]" for n in range(missing, 0, -1))]
    for key, filler in ((TOKEN_TYPES, UNUSED), (SCORES, -1000.0)):
        if key in entries:
            entries[key] = [*np.asarray(entries[key]).tolist(), *[filler] * missing]
    return entries


def _write_weights(
    file: BinaryIO,
    start: int,
    architecture: Architecture,
    config: ModelConfig,
    weights: Iterable[Weight],
    slots: Slots,
) -> None:
    where, shapes = places(architecture, config), leaf_shapes(config)
    wanted = {(name, layer) for name, place in where.items() for layer in place.layers}
    waiting: dict[str, dict[int, np.ndarray]] = {}  # parts of joined tensors
    for name, layer, array in weights:
        label = name if layer is None else f"{name} of layer {layer}"
        if (name, layer) not in wanted:
            raise UsageError(f"the weight {label} is not part of the model, or came twice")
        wanted.remove((name, layer))
        place = where[name]
        array = np.asarray(array, np.float32)
        if name in TABLES and len(array) == config.padded_vocab_size:
            array = array[: config.vocab_size]
        expected = shapes[name] if layer is None else shapes[name][1:]
        if array.shape != expected:
            raise UsageError(f"the weight {label} has shape {array.shape}, not {expected}")
        if isinstance(place, HeadsApart):
            assert layer is not None
            for tensor, rows in zip(place.tensors_of(layer), place.theirs(array), strict=True):
                _write_tensor(file, start, tensor, rows, slots)
            continue
        tensor = place.tensor_of(layer)
        parts = waiting.setdefault(tensor, {})
        parts[place.start] = place.theirs(array)
        if len(parts) == place.joined:
            joined = np.concatenate([parts[first] for first in sorted(parts)])
            _write_tensor(file, start, tensor, joined, slots)
            del waiting[tensor]
    if wanted:
        name, layer = min(wanted, key=str)
        label = name if layer is None else f"{name} of layer {layer}"
        raise UsageError(f"{len(wanted)} weights of the model are missing, among them {label}")


def _write_tensor(file: BinaryIO, start: int, tensor: str, rows: np.ndarray, slots: Slots) -> None:
    first, last, block_type = slots[tensor]
    stored = quantize(rows, block_type, tensor)
    assert stored.nbytes == last - first
    file.seek(start + first)
    file.write(stored.data)
