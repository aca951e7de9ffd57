"""What an entry of data.sources stands for, and what is refused with its path."""

import os
from pathlib import Path

import pytest

from jaxdist.config import UsageError
from jaxdist.data.sources import FileSource, resolve


def files(entry: str) -> list[str]:
    source = resolve(entry)
    assert isinstance(source, FileSource)
    return [file.name for file in source.files]


def test_embedded_text_is_whole():
    parts = list(resolve("embedded").parts())
    assert len(parts) == 9 and all(part.ends for part in parts)
    size = sum(len(part.text) for part in parts)
    assert 1_000_000 < size < 1_200_000
    assert all(part.text.isascii() for part in parts)


def test_files_folders_and_globs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("b.txt", "a.jsonl", "deep/c.txt", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert files(str(tmp_path / "b.txt")) == ["b.txt"]
    assert files(str(tmp_path)) == ["a.jsonl", "b.txt", "c.txt"]
    assert files(str(tmp_path / "*.txt")) == ["b.txt"]
    assert files(str(tmp_path / "**" / "*.txt")) == ["b.txt", "c.txt"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert files("~/b.txt") == ["b.txt"]


def test_options_reach_the_source(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a\n--\nb\n")
    source = resolve({"path": str(tmp_path / "a.txt"), "separator": "--", "weight": 2})
    assert [part.text for part in source.parts()] == ["a\n", "b\n"]


@pytest.mark.parametrize(
    ("path", "option", "by"),
    [
        ("a.txt", "field", "JSON lines, parquet files and datasets"),
        ("a.jsonl", "separator", ".txt files"),
        ("a.jsonl", "split", "Hugging Face datasets"),
        ("a.txt", "subset", "Hugging Face datasets"),
        ("embedded", "field", "JSON lines"),
        ("hf:name", "separator", ".txt files"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(
    path: str, option: str, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a.jsonl"):
        Path(name).write_text("{}")
    with pytest.raises(UsageError, match=f"{path} is given {option}='x', which only {by}"):
        resolve({"path": path, option: "x"})
    both = resolve({"path": str(tmp_path), "field": "f", "separator": "-"})
    assert isinstance(both, FileSource) and (both.field, both.separator) == ("f", "-")


def test_identity_follows_the_content(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("abc")
    before = resolve(str(file)).identity
    assert resolve(str(file)).identity == before
    file.write_text("abcd")
    assert resolve(str(file)).identity != before
    assert resolve({"path": str(file), "separator": "-"}).identity != resolve(str(file)).identity


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("nothing.txt", "no file or folder .*nothing.txt; .*hf:NAME"),
        ("*.txt", "nothing that ends in .txt.* matches .*\\*.txt"),
        ("empty", "the folder .*empty holds no file"),
        ("a.md", "a.md is of no known kind; it must end in .txt"),
    ],
)
def test_nothing_to_read_is_refused_with_its_path(entry: str, said: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.md").write_text("x")
    with pytest.raises(UsageError, match=said):
        resolve(str(tmp_path / entry))


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path):
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(UsageError, match="a.txt is a pipe or a device.*write its text to a file"):
        resolve(str(tmp_path / "a.txt"))


@pytest.mark.parametrize("entry", ["", "*", "*.txt", "**/*.txt", "a.*"])
@pytest.mark.parametrize("alone", [True, False])
def test_what_is_no_file_among_others_is_named(entry: str, alone: bool, tmp_path: Path):
    os.mkfifo(tmp_path / "a.txt")
    if not alone:
        (tmp_path / "b.txt").write_text("x")
        (tmp_path / "c.txt").write_text("x")
    with pytest.raises(UsageError, match="a.txt, which .* takes in, is a pipe or a device"):
        resolve(str(tmp_path / entry))


def test_links_and_folders_that_are_named_as_files(tmp_path: Path):
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    for entry in ("a.txt", "*.txt", ""):
        with pytest.raises(UsageError, match="a.txt.* is a link to nothing"):
            resolve(str(tmp_path / entry))
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").symlink_to(tmp_path / "b.txt")
    assert files(str(tmp_path / "*.txt")) == ["a.txt", "b.txt"]
    (tmp_path / "d.txt").mkdir()
    (tmp_path / "d.txt" / "e.txt").write_text("x")
    with pytest.raises(UsageError, match=r"d.txt, which .* is a folder; .*d.txt/\*"):
        resolve(str(tmp_path / "*.txt"))
    assert files(str(tmp_path)) == ["a.txt", "b.txt", "e.txt"]


def test_a_pipe_that_is_named_otherwise_is_refused_by_a_glob_alone(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a.txt").write_text("x")
    assert files(str(tmp_path)) == files(str(tmp_path / "*.txt")) == ["a.txt"]
    with pytest.raises(UsageError, match="pipe, which .* is a pipe"):
        resolve(str(tmp_path / "*"))


def test_errors_name_the_option_that_named_the_source(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    for entry in (
        str(tmp_path / "nothing.txt"),
        str(tmp_path / "*.json"),
        {"path": str(tmp_path / "a.txt"), "field": "text"},
    ):
        with pytest.raises(UsageError, match="^data.sources: "):
            resolve(entry)
        with pytest.raises(UsageError, match="^data.validation_sources: "):
            resolve(entry, "data.validation_sources")


def test_a_home_of_nobody_is_refused():
    with pytest.raises(UsageError, match="no file or folder ~nobody-of-this-name"):
        resolve("~nobody-of-this-name/a.txt")


def test_unreadable_files_are_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    user = os.geteuid()
    try:
        if user == 0:
            os.seteuid(65534)  # root reads everything, nobody does not
        with pytest.raises(PermissionError, match="a.txt"):
            resolve(str(tmp_path / "a.txt"))
    finally:
        os.seteuid(user)


@pytest.mark.slow
def test_hugging_face_datasets(tmp_path: Path):
    import datasets

    rows = datasets.Dataset.from_dict({"body": ["one", "two"], "n": [1, 2]})
    rows.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(tmp_path / "both")
    for path, options, texts in (
        (str(tmp_path / "single"), {}, ["one", "two"]),
        (f"hf:{tmp_path}/both", {}, ["one", "two"]),
        (str(tmp_path / "both"), {"split": "test"}, ["two"]),
    ):
        source = resolve({"path": path, "field": "body", **options})
        assert [part.text for part in source.parts()] == texts
        assert source.identity == resolve({"path": path, "field": "body", **options}).identity
    with pytest.raises(UsageError, match="no field 'text'; its fields are body, n"):
        resolve(str(tmp_path / "single")).identity  # noqa: B018
    with pytest.raises(UsageError, match="cannot load split train of the dataset"):
        resolve("hf:").identity  # noqa: B018
    with pytest.raises(UsageError, match="cannot load split validation of the dataset"):
        resolve({"path": str(tmp_path / "both"), "split": "validation"}).identity  # noqa: B018
