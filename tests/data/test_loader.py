"""The loader: a pure function of (seed, step), whole epochs, the same for every mesh."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config import (
    DataConfig,
    EvalConfig,
    ModelConfig,
    RunConfig,
    TrainConfig,
    UsageError,
)
from jaxdist.data import Batch, Loader, make_loader


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(T: int = 8, B: int = 4, seed: int = 0, vocab: int = 257, **data: Any) -> RunConfig:
    model = ModelConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    train = TrainConfig(sequence_length=T, global_batch_size=B, steps=10)
    evaluated = EvalConfig(every=5 if data.get("validation_sources") else None)
    return RunConfig(
        seed=seed, mesh="1x1x1", model=model, train=train, eval=evaluated, data=DataConfig(**data)
    )


def text_file(folder: Path, name: str = "a.jsonl", documents: int = 23, letter: str = "") -> str:
    """JSON lines of documents of many lengths, each of a letter of its own unless one is given."""
    lines = []
    for i in range(documents):
        lines.append(f'{{"text": "{(letter or chr(65 + i)) * (3 + 5 * i % 41)}"}}')
    (folder / name).write_text("\n".join(lines))
    return str(folder / name)


def same(a: Batch, b: Batch) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def stream(loader: Loader, B: int, begin: int, end: int) -> list[bytes]:
    """Rows [begin, end) of the endless stream, as bytes."""
    rows = []
    for i in range(begin, end):
        step, at = divmod(i, B)
        rows.append(np.stack(loader.rows(step, at, at + 1)).tobytes())
    return rows


@given(step=st.integers(0, 10**9), cuts=st.sets(st.integers(0, 12)), seed=st.integers(0, 9))
@settings(deadline=None, max_examples=30)
def test_parts_of_a_batch_are_the_batch(step: int, cuts: set[int], seed: int):
    loader = make_loader(config(B=12, seed=seed))
    whole = loader.rows(step, 0, 12)
    borders = sorted({0, 12} | cuts)
    parts = [loader.rows(step, a, b) for a, b in zip(borders, borders[1:], strict=False)]
    assert same(whole, Batch(*map(np.concatenate, zip(*parts, strict=True))))
    assert same(whole, make_loader(config(B=12, seed=seed)).rows(step, 0, 12))


def test_a_batch_is_int32_with_labels_that_follow():
    batch = make_loader(config(T=16)).rows(3, 0, 4)
    for field in batch:
        assert field.shape == (4, 16) and field.dtype == np.int32
    np.testing.assert_array_equal(batch.tokens[0, 1:], batch.labels[0, :-1])


@pytest.mark.parametrize("B", [4, 7, 64, 1000])
def test_every_row_once_an_epoch_across_batch_borders(B: int, tmp_path: Path):
    loader = make_loader(config(B=B, sources=[text_file(tmp_path)]))
    n = loader.num_rows
    assert n > 20
    epochs = [stream(loader, B, i * n, (i + 1) * n) for i in range(3)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2]
    tokens = sum(np.frombuffer(row, np.int32).reshape(5, -1)[2].sum() for row in epochs[0])
    assert tokens == loader.tokens_per_epoch


def test_the_stream_does_not_depend_on_the_batch_size(tmp_path: Path):
    sources = [text_file(tmp_path)]
    streams = [stream(make_loader(config(B=B, sources=sources)), B, 0, 90) for B in (1, 5, 90)]
    assert streams[0] == streams[1] == streams[2]


def test_all_text_is_trained_once_and_documents_do_not_touch(tmp_path: Path):
    loader = make_loader(config(B=1, sources=[text_file(tmp_path)], validation_fraction=0.0))
    pairs = Counter()
    for step in range(loader.num_rows):
        row = loader.rows(step, 0, 1)
        on = row.loss_mask == 1
        pairs.update(zip(row.tokens[on].tolist(), row.labels[on].tolist(), strict=True))
    lengths = {65 + i: 3 + 5 * i % 41 for i in range(23)}
    expected = Counter({(letter, letter): n - 1 for letter, n in lengths.items()})
    assert pairs == expected + Counter({(letter, 256): 1 for letter in lengths})


def test_validation_is_disjoint_fixed_and_of_the_asked_size(tmp_path: Path):
    sources = [text_file(tmp_path)]
    train = make_loader(config(B=2, sources=sources, validation_fraction=0.2))
    held = make_loader(config(B=2, sources=sources, validation_fraction=0.2), "validation")
    total = make_loader(config(B=2, sources=sources, validation_fraction=0.0)).tokens_per_epoch
    assert train.tokens_per_epoch + held.tokens_per_epoch == total
    assert held.tokens_per_epoch == round(0.2 * total)
    other = make_loader(config(B=2, seed=9, sources=sources, validation_fraction=0.2), "validation")
    assert same(held.rows(3, 0, 2), other.rows(3, 0, 2))
    assert train.fingerprint != held.fingerprint


def test_held_back_rows_come_once_and_then_padding(tmp_path: Path):
    given: dict[str, Any] = {"sources": [text_file(tmp_path)], "validation_fraction": 0.2}
    held = make_loader(config(B=5, **given), "validation")
    num_batches = -(-held.num_rows // 5)
    assert held.num_rows % 5, "the last batch is to be a part"
    batches = [held.rows(step, 0, 5) for step in range(num_batches)]
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == held.tokens_per_epoch
    rest = held.rows(num_batches - 1, held.num_rows % 5, 5)
    assert not np.any(np.stack(rest)) and not np.any(np.stack(held.rows(num_batches, 0, 5)))


def test_validation_sources_of_their_own(tmp_path: Path):
    given: dict[str, Any] = {
        "sources": [text_file(tmp_path, letter="a")],
        "validation_sources": [text_file(tmp_path, "v.jsonl", letter="v")],
    }
    train, held = make_loader(config(**given)), make_loader(config(**given), "validation")
    assert train.tokens_per_epoch == held.tokens_per_epoch
    assert set(held.rows(0, 0, 4).tokens.ravel().tolist()) <= {0, ord("v")}
    assert set(train.rows(0, 0, 4).tokens.ravel().tolist()) <= {0, ord("a")}


def test_weights_set_each_sources_part(tmp_path: Path):
    sources = [
        {"path": text_file(tmp_path, "a.jsonl", letter="a"), "weight": 3},
        {"path": text_file(tmp_path, "b.jsonl", documents=5, letter="b"), "weight": 1},
    ]
    loader = make_loader(config(B=100, sources=sources, pack=False))
    first = loader.rows(2, 0, 100).tokens[:, 0]
    assert Counter(first.tolist()) == {ord("a"): 75, ord("b"): 25}


def test_sources_without_weights_are_one_epoch(tmp_path: Path):
    sources = [text_file(tmp_path, f"{letter}.jsonl", letter=letter) for letter in "abc"]
    loader = make_loader(config(B=10, sources=sources))
    assert loader.num_rows == 3 * make_loader(config(sources=sources[:1])).num_rows
    letters = Counter()
    for i in range(loader.num_rows):
        letters[loader.rows(*divmod(i, 10), i % 10 + 1).tokens[0, 0]] += 1
    assert len(letters) == 3 and len(set(letters.values())) == 1


def test_a_text_of_one_row_works(tmp_path: Path):
    (tmp_path / "a.txt").write_text("abc")
    loader = make_loader(config(B=4, sources=[str(tmp_path / "a.txt")], validation_fraction=0.0))
    batch = loader.rows(10**7, 0, 4)
    assert loader.num_rows == 1
    np.testing.assert_array_equal(batch.tokens, [[97, 98, 99, 0, 0, 0, 0, 0]] * 4)
    np.testing.assert_array_equal(batch.labels, [[98, 99, 256, 0, 0, 0, 0, 0]] * 4)


def test_fingerprint_names_content_and_making(tmp_path: Path):
    a, b = text_file(tmp_path, "a.jsonl"), text_file(tmp_path, "b.jsonl")
    base = make_loader(config(sources=[a])).fingerprint
    assert make_loader(config(sources=[b], seed=3, B=7)).fingerprint == base
    for changed in (
        config(sources=[text_file(tmp_path, "c.jsonl", letter="z")]),
        config(sources=[a], T=16),
        config(sources=[a], pack=False),
        config(sources=[a], validation_fraction=0.1),
        config(sources=[{"path": a, "weight": 1}, {"path": b, "weight": 1}]),
    ):
        assert make_loader(changed).fingerprint != base


def test_synthetic_needs_no_file():
    loader = make_loader(config(T=32, vocab=50, sources=["synthetic"]))
    batch = loader.rows(5, 0, 4)
    assert loader.vocab_size == 50 and 0 <= batch.tokens.min() <= batch.tokens.max() < 50
    assert batch.loss_mask.all() and same(batch, loader.rows(5, 0, 4))
    held = make_loader(config(T=32, vocab=50, sources=["synthetic"]), "validation")
    assert not same(batch, held.rows(5, 0, 4))


@pytest.mark.parametrize(
    ("changes", "split", "said"),
    [
        ({"vocab": 200}, "train", "257 tokens, more than model.vocab_size=200"),
        ({"sources": ["/nonexistent/t.txt"]}, "train", "/nonexistent/t.txt"),
        ({"validation_fraction": 0.0}, "validation", "holds nothing back.*set eval.every"),
    ],
)
def test_refused(changes: dict[str, Any], split: Any, said: str):
    with pytest.raises(UsageError, match=said):
        make_loader(config(**changes), split)


def test_what_is_wrong_with_validation_sources_names_them(tmp_path: Path):
    (tmp_path / "empty.txt").write_text("")
    for entry, said in (
        ("nothing.txt", "data.validation_sources: no file or folder"),
        ("*.json", "data.validation_sources: nothing that ends in"),
        ("empty.txt", "data.validation_sources: .*empty.txt holds no text"),
    ):
        given = config(sources=[text_file(tmp_path)], validation_sources=[str(tmp_path / entry)])
        make_loader(given)
        with pytest.raises(UsageError, match=said):
            make_loader(given, "validation")


def test_numbers_written_otherwise_are_the_same_data(tmp_path: Path):
    a, b = text_file(tmp_path), text_file(tmp_path, "b.jsonl")

    def fingerprint(one: Any, none: Any) -> str:
        mixture = [{"path": a, "weight": one}, {"path": b, "weight": one}]
        return make_loader(config(sources=mixture, validation_fraction=none)).fingerprint

    assert fingerprint(1, 0) == fingerprint(1.0, 0.0)


def test_too_little_text_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("a")
    sources = [str(tmp_path / "a.txt")]
    with pytest.raises(UsageError, match="leaves nothing to train on in .*a.txt"):
        make_loader(config(sources=sources, validation_fraction=0.9))
    with pytest.raises(UsageError, match="0.1 holds nothing back from .*a.txt"):
        make_loader(config(sources=sources, validation_fraction=0.1), "validation")


def test_rows_outside_the_batch_are_refused():
    loader = make_loader(config())
    for step, start, stop in ((-1, 0, 1), (0, 2, 1), (0, 0, 5)):
        with pytest.raises(ValueError, match="not within a global batch of 4"):
            loader.rows(step, start, stop)


FIRST_BATCH = """
import sys
from jaxdist.config import DataConfig, ModelConfig, RunConfig
from jaxdist.data import make_loader
loader = make_loader(RunConfig(mesh="1x1x1", model=ModelConfig.from_preset("tiny")))
print(loader.fingerprint, loader.rows(7, 0, 16).tokens.sum())
"""


def test_two_runs_at_once_read_the_same():
    command = [sys.executable, "-c", FIRST_BATCH]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert outputs[0] == outputs[1] and outputs[0]


def test_importing_the_room_loads_no_jax():
    check = "import sys, jaxdist.data; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
