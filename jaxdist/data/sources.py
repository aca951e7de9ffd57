"""Where text comes from: files, folders, globs, Hugging Face datasets, the text in the package.

A source yields its documents as `Part`s of bounded size, so that a file of many gigabytes is never
held whole, and an `identity` that changes with its content, by which the tokenized form is kept on
disk (`tokenized.py`).
"""

import glob
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxdist.config.errors import UsageError
from jaxdist.data.readers import SUFFIXES, Part, is_text, no_field, read_file, text_of

SOURCES = "data.sources"  # the option that names them, where no other does
EMBEDDED, HUGGING_FACE = "embedded", "hf:"
EMBEDDED_FOLDER = Path(__file__).with_name("embedded")
# Option of an entry -> what reads it.
READ_BY = {
    "field": "JSON lines, parquet files and datasets",
    "separator": ".txt files",
    "subset": "Hugging Face datasets",
    "split": "Hugging Face datasets",
}


class Source(ABC):
    """Documents from one place.

    Attributes:
        name: What the user wrote, for messages.
        option: Where the user wrote it, such as "data.sources", for messages.
        identity: Changes when the documents do.
    """

    name: str
    option: str = SOURCES
    identity: str

    @abstractmethod
    def parts(self) -> Iterator[Part]:
        """The documents' parts, always in the same order."""


@dataclass(frozen=True, kw_only=True)
class FileSource(Source):
    """Text, JSON-lines and parquet files, read in the order given.

    Attributes:
        files: The files; their paths, sizes and times of change are the identity.
        field: Name of the text in JSON objects and parquet columns.
        separator: A line that ends a document of a .txt file; None where a file is one document.
    """

    name: str
    files: tuple[Path, ...]
    field: str = "text"
    separator: str | None = None
    option: str = SOURCES

    @property
    def identity(self) -> str:  # type: ignore[override]
        stats = [
            (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns)
            for file in self.files
        ]
        return json.dumps(["files", stats, self.field, self.separator])

    def parts(self) -> Iterator[Part]:
        for file in self.files:
            yield from read_file(file, self.field, self.separator)


@dataclass(frozen=True, kw_only=True)
class HuggingFaceSource(Source):
    """A dataset of the `datasets` library: a name on the hub, or a folder made by `save_to_disk`.

    Attributes:
        name: The dataset's name or folder.
        subset: The hub's configuration name; None for the default one.
        split: Which split is read.
        field: Column that holds the text.
    """

    name: str
    subset: str | None = None
    split: str = "train"
    field: str = "text"
    option: str = SOURCES

    @property
    def identity(self) -> str:  # type: ignore[override]
        return json.dumps(["hugging face", self._dataset._fingerprint, self.field])

    def parts(self) -> Iterator[Part]:
        for i, row in enumerate(self._dataset.select_columns([self.field])):
            yield Part(text_of(row[self.field], f"{self.name}: row {i + 1}", self.field), True)

    @cached_property
    def _dataset(self) -> Any:
        try:
            import datasets
            from datasets.exceptions import DatasetsError
        except ImportError as error:
            raise UsageError(
                f"{self.option}: {self.name} needs the package datasets: pip install datasets"
            ) from error
        folder = Path(os.path.expanduser(self.name))
        try:
            if _is_saved_dataset(folder):
                loaded = datasets.load_from_disk(str(folder))
                loaded = loaded[self.split] if isinstance(loaded, datasets.DatasetDict) else loaded
            else:
                loaded = datasets.load_dataset(self.name, self.subset, split=self.split)
        except (LookupError, ValueError, OSError, DatasetsError) as error:
            part = f"split {self.split}" + (f" of subset {self.subset}" if self.subset else "")
            raise UsageError(
                f"{self.option}: cannot load {part} of the dataset {self.name}: {error}"
            ) from error
        if self.field not in loaded.column_names:
            raise UsageError(no_field(self.name, self.field, loaded.column_names))
        return loaded


def resolve(entry: str | Mapping[str, Any], option: str = SOURCES) -> Source:
    """The source that an entry of `data.sources` names; `synthetic` is no text and not known here.

    Raises UsageError where there is nothing to read, with the path, and for an option that nothing
    there reads. The error begins with `option`, where the entry was written.
    """
    options = {"path": entry} if isinstance(entry, str) else dict(entry)
    path, field = options["path"], options.get("field") or "text"
    place = Path(os.path.expanduser(path))
    if path.startswith(HUGGING_FACE) or _is_saved_dataset(place):
        _refuse_unread(path, options, {"field", "subset", "split"}, option)
        return HuggingFaceSource(
            name=path.removeprefix(HUGGING_FACE),
            subset=options.get("subset"),
            split=options.get("split") or "train",
            field=field,
            option=option,
        )
    if path == EMBEDDED:
        files = tuple(sorted(EMBEDDED_FOLDER.glob("*.txt")))
    else:
        files = _files(path, place, option)
    read = {"separator" if is_text(file) else "field" for file in files}
    _refuse_unread(path, options, read, option)
    separator = options.get("separator")
    return FileSource(name=path, files=files, field=field, separator=separator, option=option)


def _refuse_unread(path: str, options: Mapping[str, Any], read: set[str], option: str) -> None:
    for name, by in READ_BY.items():
        if options.get(name) is not None and name not in read:
            raise UsageError(
                f"{option}: {path} is given {name}={options[name]!r}, which only {by} have; "
                "leave it out"
            )


def _files(path: str, place: Path, option: str) -> tuple[Path, ...]:
    suffixes = ", ".join(SUFFIXES)
    if place.is_dir():
        files = [file for file in sorted(place.rglob("*")) if _is_named_as_text(file)]
        files = [file for file in files if not file.is_dir()]
        nothing = f"the folder {path} holds no file that ends in {suffixes}"
    elif os.path.lexists(place):
        _refuse_no_file(place, path, option)
        files = [place] if _is_named_as_text(place) else []
        nothing = f"{path} is of no known kind; it must end in {suffixes}"
    elif glob.has_magic(path):
        found = [Path(file) for file in sorted(glob.glob(str(place), recursive=True))]
        for file in found:
            if not file.is_dir():
                _refuse_no_file(file, path, option)
        files = [file for file in found if _is_named_as_text(file)]
        nothing = f"nothing that ends in {suffixes} matches {path}"
    else:
        raise UsageError(
            f"{option}: no file or folder {path}; a Hugging Face dataset is written "
            f"{HUGGING_FACE}NAME, the text inside the package {EMBEDDED}"
        )
    if not files:
        raise UsageError(f"{option}: {nothing}")
    for file in files:
        _refuse_no_file(file, path, option)
        with open(file, "rb"):  # an unreadable one is refused now, with its path
            pass
    return tuple(files)


def _is_named_as_text(file: Path) -> bool:
    return file.name.endswith(SUFFIXES)


def _refuse_no_file(file: Path, path: str, option: str) -> None:
    """Refuse what is no file, without opening it: a pipe would block until somebody writes."""
    which = path if str(file) == os.path.expanduser(path) else f"{file}, which {path} takes in,"
    if file.is_dir():
        raise UsageError(f"{option}: {which} is a folder; name the files in it, {file}/*")
    if not file.exists():
        raise UsageError(f"{option}: {which} is a link to nothing; mend or remove it")
    if not file.is_file():
        raise UsageError(
            f"{option}: {which} is a pipe or a device, which can be read only once; write its text "
            "to a file and name that"
        )


def _is_saved_dataset(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()
