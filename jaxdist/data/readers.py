"""File formats: text, JSON lines and parquet, read into `Part`s of documents.

A line that cannot be read ends the reading with its file and number: nothing is skipped silently.
"""

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxdist.config.errors import UsageError

SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
TEXT_SUFFIXES = (".txt", ".txt.gz")
# A document of a text file is handed on in parts of about this many bytes, cut at a line's end. The
# tokenizer may see a border there that the whole text does not have.
PART_BYTES = 1 << 20


class Part(NamedTuple):
    """A piece of a document, in order; `ends` marks the document's last one."""

    text: str
    ends: bool


def read_file(file: Path, field: str, separator: str | None) -> Iterator[Part]:
    """The documents of a file whose name ends in one of SUFFIXES.

    `field` names the text in JSON objects and parquet columns; `separator` is the line that ends a
    document of a text file, which is else one document. Raises UsageError with the file and the
    line or row at fault.
    """
    if file.suffix == ".parquet":
        yield from _parquet_parts(file, field)
        return
    try:
        with gzip.open(file) if file.suffix == ".gz" else open(file, "rb") as stream:
            if is_text(file):
                yield from _text_parts(stream, file, separator)
            else:
                yield from _json_parts(stream, file, field)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{file}: not a complete gzip file ({error})") from error


def is_text(file: Path) -> bool:
    """Whether the file is plain text, as opposed to records with a field that holds the text."""
    return file.name.endswith(TEXT_SUFFIXES)


def _lines(stream: BinaryIO | gzip.GzipFile, file: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of whole lines, or of parts of a line longer than PART_BYTES."""
    decoder, number = codecs.getincrementaldecoder("utf-8")(), 1
    for raw in iter(lambda: stream.readline(PART_BYTES), b""):
        try:
            text = decoder.decode(raw)
        except UnicodeDecodeError as error:
            raise UsageError(_not_utf8(file, number, error)) from error
        yield number, text.removeprefix("\ufeff") if number == 1 else text
        number += raw.endswith(b"\n")
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise UsageError(_not_utf8(file, number, error)) from error


def _not_utf8(file: Path, number: int, error: UnicodeDecodeError) -> str:
    return (
        f"{file}: line {number} is not UTF-8 ({error.reason}); convert it, for example with iconv"
    )


def _text_parts(
    stream: BinaryIO | gzip.GzipFile, file: Path, separator: str | None
) -> Iterator[Part]:
    held: list[str] = []
    size = 0
    for _, text in _lines(stream, file):
        if separator is not None and text.strip() == separator:
            yield Part("".join(held), True)
            held, size = [], 0
            continue
        held.append(text)
        size += len(text)
        if size >= PART_BYTES:
            yield Part("".join(held), False)
            held, size = [], 0
    yield Part("".join(held), True)


def _json_parts(stream: BinaryIO | gzip.GzipFile, file: Path, field: str) -> Iterator[Part]:
    for number, raw in enumerate(stream, 1):
        if not raw.strip():
            continue
        where = f"{file}: line {number}"
        try:
            row = json.loads(raw.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise UsageError(_not_utf8(file, number, error)) from error
        except (ValueError, RecursionError) as error:  # ValueError: also a number too long
            raise UsageError(
                f"{where} is not JSON ({error}); each line must be one JSON object"
            ) from error
        if not isinstance(row, dict):
            raise UsageError(
                f"{where} is not a JSON object but a {type(row).__name__}; each line must be one"
            )
        if field not in row:
            raise UsageError(no_field(where, field, list(row)))
        text = text_of(row[field], where, field)
        # JSON may spell half of a surrogate pair, which is no character: it becomes "?".
        yield Part(text.encode("utf-8", "replace").decode() if b"\\u" in raw else text, True)


def _parquet_parts(file: Path, field: str) -> Iterator[Part]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UsageError(f"{file} needs the package pyarrow: pip install pyarrow") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            if field not in table.schema_arrow.names:
                raise UsageError(no_field(str(file), field, table.schema_arrow.names))
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield Part(text_of(value, f"{file}: row {number}", field), True)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{file}: not a readable parquet file, after row {number} ({error})"
        ) from error


def text_of(value: Any, where: str, field: str) -> str:
    """`value` if it is text; a null or a number where text should be is refused, with its place."""
    if not isinstance(value, str):
        structure = isinstance(value, Sequence | Mapping)
        fix = (
            "write it as text, a chat by its model's template" if structure else "mend or remove it"
        )
        raise UsageError(
            f"{where}: the field {field!r} holds {_kind(value)} instead of text; {fix}"
        )
    return value


def _kind(value: Any) -> str:
    return "nothing (null)" if value is None else f"a {type(value).__name__}"


def no_field(where: str, field: str, fields: Sequence[str]) -> str:
    """The message that the text's field is not there, with those that are."""
    listed = ", ".join(map(str, list(fields)[:10])) or "none"
    return (
        f"{where} has no field {field!r}; its fields are {listed}: "
        "name one, as in --data.sources '{path: FILE, field: NAME}'"
    )
