"""Each file format read in full, and every way in which a line may be broken named."""

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from jaxdist.config import UsageError
from jaxdist.data import readers
from jaxdist.data.readers import read_file


def documents(file: Path, field: str = "text", separator: str | None = None) -> list[str]:
    whole, held = [], ""
    for part in read_file(file, field, separator):
        held += part.text
        if part.ends:
            whole.append(held)
            held = ""
    assert not held
    return whole


def test_text_is_one_document_a_file(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffOne\r\n\nzwölf ".encode())
    assert documents(file) == ["One\r\n\nzwölf "]


def test_text_with_a_separator_line(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("One\n<|end|>\nTwo\nlines\n <|end|> \n")
    assert documents(file, separator="<|end|>") == ["One\n", "Two\nlines\n", ""]


@pytest.mark.parametrize("part_bytes", [3, 7, 64])
def test_long_texts_come_in_parts(part_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(readers, "PART_BYTES", part_bytes)
    file = tmp_path / "a.txt"
    text = "日本語 and a very long line without end\nshort\n\n語" * 5
    file.write_text(text)
    parts = list(read_file(file, "text", None))
    assert "".join(part.text for part in parts) == text
    assert len(parts) > 1 and [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(part.text.encode()) for part in parts) <= 2 * part_bytes + 4


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz"])
def test_json_lines(suffix: str, tmp_path: Path):
    rows = [{"text": "a\nb", "n": 1}, {"text": "", "body": "c"}, {"text": "ü"}]
    content = "\n\n".join(map(json.dumps, rows)).encode() + b"\n"
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert documents(file) == ["a\nb", "", "ü"]


def test_the_last_suffix_is_the_kind(tmp_path: Path):
    (tmp_path / "a.txt.jsonl").write_text('{"text": "a"}\n')
    assert documents(tmp_path / "a.txt.jsonl") == ["a"]


def test_half_a_surrogate_pair_is_no_character(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b \\ud83c\\udf89 \\u00fc"}\n')
    assert documents(tmp_path / "a.jsonl") == ["a?b \U0001f389 \u00fc"]


def test_parquet(tmp_path: Path):
    file = tmp_path / "a.parquet"
    table = pyarrow.table({"id": [1, 2, 3], "body": ["a", "", "ü\n"]})
    pyarrow.parquet.write_table(table, file)
    assert documents(file, "body") == ["a", "", "ü\n"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"fine\nalso\nbro\xffken\n", "a.txt: line 3 is not UTF-8"),
        ("a.txt", "fine\nends in ü".encode()[:-1], "a.txt: line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n', "a.jsonl: line 3 is not JSON"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "a.jsonl: line 2 is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n["text"]\n', "line 2 is not a JSON object but a list"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"body": "b"}\n',
            "no field 'text'.*are body.*{path: FILE",
        ),
        ("a.jsonl", b'{"text": null}\n', "line 1: the field 'text' holds nothing \\(null\\)"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: the field 'text' holds a int .*; mend or remove it"),
        ("a.jsonl", b'{"text": [{"role": "user"}]}\n', "holds a list .*; write it as text, a chat"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "line 1 is not JSON .Exceeds"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-12],
            "not a complete gzip file",
        ),
        ("a.txt.gz", b"no gzip", "not a complete gzip file"),
        ("a.parquet", b"PAR1 no parquet", "a.parquet: not a readable parquet file"),
    ],
)
def test_broken_input_is_named_by_file_and_line(
    name: str, content: bytes, said: str, tmp_path: Path
):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=said):
        documents(tmp_path / name)


def test_parquet_columns_and_nulls_are_named(tmp_path: Path):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", None]}), file)
    with pytest.raises(UsageError, match="no field 'body'; its fields are id, text"):
        documents(file, "body")
    with pytest.raises(UsageError, match=r"row 2: the field 'text' holds nothing"):
        documents(file)
