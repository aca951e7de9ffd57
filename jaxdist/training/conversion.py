"""Converting a model: any source that opens, into a Hugging Face folder or a GGUF file."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxdist.config import UsageError
from jaxdist.config.errors import did_you_mean
from jaxdist.config.json_text import read_object
from jaxdist.data.gguf_vocabulary import tokenizer_entries
from jaxdist.data.tokenizer import BYTES, load_tokenizer
from jaxdist.data.tokenizer_files import chat_template
from jaxdist.interop.gguf.file import GGUFFile
from jaxdist.interop.gguf.write import TYPES, write_gguf
from jaxdist.interop.huggingface.folder import CONFIG
from jaxdist.interop.huggingface.write import check_dtype, write_huggingface
from jaxdist.interop.leaves import layers_of, leaf_shapes
from jaxdist.training.model_source import ModelSource, open_model
from jaxdist.training.run_folder import RunFolder

GGUF_OF_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def convert(
    source: str,
    target: str,
    *,
    dtype: str | None = None,
    gguf_type: str | None = None,
    ema: bool = False,
    force: bool = False,
    console: Console | None = None,
) -> None:
    """Write the model at `source` to `target`, with a progress bar and a table of what was done.

    Args:
        source: What `open_model` opens.
        target: A GGUF file where it ends in .gguf, else a Hugging Face folder.
        dtype: Of the folder's weights; by default the source's.
        gguf_type: Of the file's weights; by default that of the source's dtype.
        ema: Whether a run's averaged weights are taken.
        force: Whether what is at `target` is replaced.
        console: Where progress and table are shown; by default standard error.

    Raises:
        UsageError: For a source that is no model, a target that is there already, and options that
            do not fit the target. Nothing is written then.
    """
    to = Path(target).expanduser()
    is_gguf = to.suffix == ".gguf"
    _check_options(is_gguf, dtype, gguf_type)
    console = console or Console(stderr=True)
    model = open_model(source, "SOURCE")
    if ema:
        model = _averaged(model)
    _check_target(to, model, is_gguf, force)
    stored = dtype or model.dtype
    weights = _counted(model, console)
    to.parent.mkdir(parents=True, exist_ok=True)
    if is_gguf:
        stored = gguf_type or GGUF_OF_DTYPE[stored]
        entries = _gguf_tokenizer(model)
        write_gguf(
            to,
            model.config,
            weights,
            gguf_type=stored,
            tokenizer=entries,
            preferred=_architecture(model),
        )
        kept = [] if entries is None else ["tokenizer"]
    else:
        companions = model.companions()
        write_huggingface(to, model.config, weights, dtype=stored, companions=companions)
        kept = sorted(companions.keys() - {CONFIG})
    _summarise(console, model, to, is_gguf, stored, kept)


def _averaged(model: ModelSource) -> ModelSource:
    if not isinstance(model.weights, RunFolder):
        raise UsageError(f"--ema: {model.path} is a {model.kind}; only runs keep an average")
    weights = model.weights.average()
    return replace(model, weights=weights, dtype=weights.dtype)


def _check_options(is_gguf: bool, dtype: str | None, gguf_type: str | None) -> None:
    if is_gguf and dtype is not None:
        raise UsageError(f"--dtype {dtype} is for Hugging Face folders; say --gguf-type")
    if not is_gguf and gguf_type is not None:
        raise UsageError(f"--gguf-type {gguf_type} asks for a file; let TARGET end in .gguf")
    if dtype is not None:
        check_dtype(dtype)
    if gguf_type is not None and gguf_type not in TYPES:
        hint = did_you_mean(gguf_type, TYPES)
        raise UsageError(f"--gguf-type {gguf_type!r} is not one of {', '.join(TYPES)}{hint}")


def _check_target(target: Path, model: ModelSource, is_gguf: bool, force: bool) -> None:
    if not target.exists():
        return
    source = model.path.resolve()
    if source == target.resolve() or target.resolve() in source.parents:
        raise UsageError(f"TARGET {target} holds SOURCE {model.path}; choose another place")
    if target.is_dir() and not any(target.iterdir()):
        return
    if not force:
        raise UsageError(f"TARGET {target} is there already; --force replaces it")
    if is_gguf == target.is_dir() or (target.is_dir() and not (target / CONFIG).is_file()):
        kind = "GGUF file" if is_gguf else "Hugging Face folder"
        raise UsageError(f"TARGET {target} is no {kind}, so it is not replaced; remove it first")


def _counted(model: ModelSource, console: Console) -> Iterator[tuple[str, int | None, Any]]:
    """The weights, with a bar that counts their numbers."""
    sizes = {name: _size(shape) for name, shape in leaf_shapes(model.config).items()}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(str(model.path), total=sum(sizes.values()))
        for name, layer, array in model.weights.weights():
            yield name, layer, array
            size = sizes[name]
            progress.advance(task, size / len(layers_of(name, model.config)))


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _architecture(model: ModelSource) -> str | None:
    """What the model is called where it comes from, by which GGUF may know it too."""
    if isinstance(model.weights, GGUFFile):
        return model.weights.architecture.name
    where = f"{CONFIG} of the model"
    name = read_object(model.companions().get(CONFIG, b"{}"), where).get("model_type")
    return name if isinstance(name, str) else None


def _gguf_tokenizer(model: ModelSource) -> dict[str, Any] | None:
    """The tokenizer's metadata; None where there is none, or it has no form in GGUF (bytes)."""
    if model.tokenizer in (None, BYTES):
        return None
    if isinstance(model.weights, GGUFFile):
        template = model.weights.chat_template
    else:
        template = chat_template(model.companions())
    return tokenizer_entries(load_tokenizer(model.tokenizer), template)


def _summarise(
    console: Console, model: ModelSource, target: Path, is_gguf: bool, stored: str, kept: list[str]
) -> None:
    config = model.config
    files = [target] if target.is_file() else list(target.iterdir())
    table = Table(show_header=False, box=None)
    table.add_row("from", f"{model.path} ({model.kind})")
    table.add_row("to", f"{target} ({'GGUF file' if is_gguf else 'Hugging Face folder'})")
    parameters = sum(map(_size, leaf_shapes(config).values()))
    shape = f"{config.num_hidden_layers} layers x {config.hidden_size}"
    table.add_row("model", f"{parameters:,} parameters, {shape}, {config.vocab_size} tokens")
    table.add_row("stored as", f"{stored}, {sum(f.stat().st_size for f in files) / 1e6:,.1f} MB")
    table.add_row("kept with it", ", ".join(kept) or "no tokenizer")
    console.print(table)
