"""Documents with their borders on disk, whatever their parts and batches were."""

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from jaxdist.config import UsageError
from jaxdist.data import tokenized as module
from jaxdist.data.readers import Part
from jaxdist.data.sources import Source, resolve
from jaxdist.data.tokenized import tokenized
from jaxdist.data.tokenizer import BytesTokenizer, load_tokenizer


@dataclass
class Listed(Source):
    """Documents given as lists of their parts."""

    documents: list[list[str]]
    name: str = "listed"

    @property
    def identity(self) -> str:  # type: ignore[override]
        return repr(self.documents)

    def parts(self) -> Iterator[Part]:
        for document in self.documents:
            for i, text in enumerate(document):
                yield Part(text, i == len(document) - 1)


DOCUMENTS = [["ab"], [""], ["", "c", "", "de"], ["f", ""], ["", ""], ["g"]]


@pytest.mark.parametrize("batch", [1, 3, 1000])
@pytest.mark.parametrize(("bos", "eos"), [(None, 256), (257, 256), (257, None), (None, None)])
def test_documents_keep_their_borders(
    batch: int, bos: int | None, eos: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "BATCH_CHARACTERS", batch)
    tokenizer = BytesTokenizer()
    tokenizer.bos_id, tokenizer.eos_id = bos, eos
    made = tokenized(Listed(DOCUMENTS), tokenizer, tmp_path)
    documents = np.split(made.tokens, made.offsets[1:-1])
    opening, closing = ([] if one is None else [one] for one in (bos, eos))
    # Documents without text are no documents.
    expected = [[*opening, *text.encode(), *closing] for text in ("ab", "cde", "f", "g")]
    assert [document.tolist() for document in documents] == expected
    assert made.tokens.dtype == np.uint16


def test_large_vocabularies_take_four_bytes(tmp_path: Path):
    tokenizer = BytesTokenizer()
    tokenizer.vocab_size, tokenizer.eos_id = 70_000, 69_999
    assert tokenized(Listed([["a"]]), tokenizer, tmp_path).tokens.tolist() == [97, 69_999]


def test_read_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = Listed(DOCUMENTS)
    first = tokenized(source, BytesTokenizer(), tmp_path)
    monkeypatch.setattr(Listed, "parts", None)  # a second reading would fail
    second = tokenized(source, BytesTokenizer(), tmp_path)
    assert second.fingerprint == first.fingerprint
    np.testing.assert_array_equal(second.tokens, first.tokens)


def test_fingerprint_is_of_the_content(tmp_path: Path):
    (tmp_path / "a.txt").write_text("same")
    (tmp_path / "b.txt").write_text("same")
    (tmp_path / "c.txt").write_text("other")
    a, b, c = (
        tokenized(resolve(str(tmp_path / name)), load_tokenizer("bytes"), tmp_path / "cache")
        for name in ("a.txt", "b.txt", "c.txt")
    )
    assert a.fingerprint == b.fingerprint != c.fingerprint


def test_sources_without_text_are_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="listed holds no text"):
        tokenized(Listed([[""], [""]]), BytesTokenizer(), tmp_path)
    assert not list(tmp_path.glob("tokens-*[!k]"))


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path):
    source = Listed([["a"]])

    def growing() -> Iterator[Part]:
        yield Part("a", True)
        source.documents.append(["b"])

    source.parts = growing  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="changed while it was read"):
        tokenized(source, BytesTokenizer(), tmp_path)


def test_a_broken_line_keeps_nothing(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "good"}\n{"text": broken}\n')
    with pytest.raises(UsageError, match="line 2"):
        tokenized(resolve(str(file)), BytesTokenizer(), tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    file.write_text('{"text": "good"}\n{"text": "mended"}\n')
    made = tokenized(resolve(str(file)), BytesTokenizer(), tmp_path / "cache")
    assert len(made.offsets) == 3


TOKENIZE = """
import sys
from pathlib import Path
from jaxdist.data.sources import resolve
from jaxdist.data.tokenized import tokenized
from jaxdist.data.tokenizer import load_tokenizer
print(tokenized(resolve(sys.argv[1]), load_tokenizer("bytes"), Path(sys.argv[2])).fingerprint)
"""


@pytest.mark.slow
def test_runs_killed_at_any_moment_leave_whole_tokens(tmp_path: Path):
    file, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    line = '{"text": "' + "All the world's a stage. " * 20 + '"}\n'
    file.write_text("".join(f"{line[:-3]} {i}{line[-3:]}" for i in range(40_000)))
    whole = tokenized(resolve(str(file)), BytesTokenizer(), tmp_path / "undisturbed").fingerprint
    command = [sys.executable, "-c", TOKENIZE, str(file), str(cache)]
    chance, killed, longest = random.Random(0), 0, 1.5
    for _ in range(40):
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        time.sleep(chance.uniform(0.1, longest))
        run.kill()
        run.communicate()
        killed += run.returncode != 0
        if killed == 8:
            break
        if run.returncode == 0:  # it was faster than the chance allows for: begin again
            longest *= 0.7
            shutil.rmtree(cache)
    assert killed == 8
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == whole
    assert sorted(path.suffix for path in cache.iterdir()) == ["", ".lock"]


@pytest.mark.parametrize("name", ["tokens.bin", "offsets.npy", "about.json"])
@pytest.mark.parametrize("content", [None, b"", b"xx"])
def test_damaged_files_are_named(name: str, content: bytes | None, tmp_path: Path):
    tokenized(Listed(DOCUMENTS), BytesTokenizer(), tmp_path)
    (file,) = tmp_path.rglob(name)
    file.unlink() if content is None else file.write_bytes(content)
    with pytest.raises(UsageError, match="tokens-.* is damaged .*; remove it"):
        tokenized(Listed(DOCUMENTS), BytesTokenizer(), tmp_path)
