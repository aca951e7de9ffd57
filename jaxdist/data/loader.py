"""Rows of the global batch, by step: where the data's way ends and the training step begins.

text (`sources.py`) -> tokens on disk (`tokenized.py`) -> rows (`packing.py`) -> the endless stream
(`order.py`). The state of the data is the step number. What a row holds depends on the seed, the
step and its place in the batch alone: neither on the mesh nor on the number of processes, each of
which asks for its own rows only.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np

from jaxdist.config import DataConfig, RunConfig
from jaxdist.config.data import SYNTHETIC, source_path
from jaxdist.config.errors import UsageError
from jaxdist.data.cache import cache_root
from jaxdist.data.order import Order
from jaxdist.data.packing import Batch, RowTable, hold_back, row_table, write_row
from jaxdist.data.sources import SOURCES, resolve
from jaxdist.data.synthetic import SyntheticRows
from jaxdist.data.tokenized import TokenizedSource, tokenized
from jaxdist.data.tokenizer import Tokenizer, check_fits, load_tokenizer

Split = Literal["train", "validation"]
Entries = Sequence[str | Mapping[str, Any]]
# Evaluations read the same rows whatever a run's seed is, so that their losses compare.
VALIDATION_SEED = 0


class Rows(Protocol):
    """A source as numbered rows. num_tokens counts those that the loss counts."""

    name: str
    num_rows: int
    num_tokens: int
    fingerprint: str

    def write(self, row: int, out: Batch, at: int) -> None:
        """Fill row `at` of `out`, which is empty, with row number `row`."""
        ...


class TextRows:
    """The packed rows of one side (training or validation) of a tokenized source."""

    def __init__(self, source: TokenizedSource, table: RowTable):
        self.name, self.fingerprint = source.name, source.fingerprint
        self.num_rows, self.num_tokens = table.num_rows, int(table.length.sum(dtype=np.int64))
        self._table, self._tokens = table, source.tokens

    def write(self, row: int, out: Batch, at: int) -> None:
        write_row(self._table, row, self._tokens, out, at)


class Loader:
    """The endless stream of rows, cut into global batches; with `once` its first epoch alone, and
    after it rows of padding.

    Attributes:
        num_rows: Rows in an epoch: of all sources, each once. May be less than a global batch.
        tokens_per_epoch: Tokens in them that the loss counts.
        vocab_size: The tokenizer's, or the model's for synthetic rows.
        fingerprint: Of the tokens, the tokenizer and how rows are made of them; the same on every
            machine.
        summary: One line for the log.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        weights: Sequence[float] | None,
        *,
        batch_size: int,
        length: int,
        seed: int,
        vocab_size: int,
        fingerprint: str,
        once: bool = False,
    ):
        self._groups = [[one] for one in rows] if weights else [list(rows)]
        self._borders = [np.cumsum([one.num_rows for one in group]) for group in self._groups]
        self._order = Order([int(border[-1]) for border in self._borders], weights, seed)
        self._batch_size, self._length, self._once = batch_size, length, once
        self.num_rows = sum(one.num_rows for one in rows)
        self.tokens_per_epoch = sum(one.num_tokens for one in rows)
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        padding = 1 - self.tokens_per_epoch / (self.num_rows * length)
        names = ", ".join(one.name for one in rows[:3])
        names += f" and {len(rows) - 3} more" * (len(rows) > 3)
        size = f"{self.tokens_per_epoch:,} tokens in {self.num_rows:,} rows of {length}"
        self.summary = f"{names}: {size}, {padding:.1%} padding"

    def rows(self, step: int, start: int, stop: int) -> Batch:
        """Rows [start, stop) of the global batch of `step`; steps and rows count from 0."""
        if not (step >= 0 and 0 <= start <= stop <= self._batch_size):
            raise ValueError(
                f"rows [{start}, {stop}) of step {step} are not within a global batch "
                f"of {self._batch_size}"
            )
        batch = Batch.empty(stop - start, self._length)
        positions = step * self._batch_size + np.arange(start, stop)
        if self._once:
            positions = positions[positions < self.num_rows]
        groups, numbers = (array.tolist() for array in self._order.at(positions))
        for at, (group, row) in enumerate(zip(groups, numbers, strict=True)):
            borders = self._borders[group]
            which = int(np.searchsorted(borders, row, side="right"))
            source = self._groups[group][which]
            source.write(row - (int(borders[which]) - source.num_rows), batch, at)
        return batch


def make_loader(config: RunConfig, split: Split = "train") -> Loader:
    """The loader of one split; tokenizes what is not in the cache yet.

    Raises UsageError for sources that are missing, empty or unreadable, a tokenizer that does not
    fit the model, and a split that holds no rows.
    """
    data, length = config.data, config.train.sequence_length
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r} is neither train nor validation")
    option, sources, held = _entries(data, split)
    side = int(split == "validation")
    if SYNTHETIC in map(source_path, sources):
        vocab_size = config.model.vocab_size
        rows: list[Rows] = [SyntheticRows(vocab_size=vocab_size, length=length, stream=side)]
        weights, made_of = None, "none"
    else:
        tokenizer = _tokenizer(data.tokenizer)
        check_fits(tokenizer, config.model)
        vocab_size, made_of = tokenizer.vocab_size, tokenizer.fingerprint
        weights = _weights(sources)
        rows = [
            TextRows(source, row_table(hold_back(source.offsets, held)[side], length, data.pack))
            for source in _tokenized(sources, tokenizer, data.cache_dir, option)
        ]
        _refuse_empty(rows, weights, split, data)
    told = [[one.fingerprint for one in rows], weights, made_of, split, held, length, data.pack]
    return Loader(
        rows,
        weights,
        batch_size=config.train.global_batch_size,
        length=length,
        seed=VALIDATION_SEED if split == "validation" else config.seed,
        vocab_size=vocab_size,
        fingerprint=hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16],
        once=split == "validation" and weights is None,
    )


def _entries(data: DataConfig, split: Split) -> tuple[str, Entries, float]:
    """(option that names them, sources, part of them that is held back) of a split."""
    if not data.validation_sources:
        return SOURCES, data.sources, float(data.validation_fraction)
    # Sources of their own are validation as a whole, and nothing is held back from the others.
    if split == "validation":
        return "data.validation_sources", data.validation_sources, 1.0
    return SOURCES, data.sources, 0.0


def _tokenized(
    entries: Entries, tokenizer: Tokenizer, cache_dir: str | None, option: str
) -> Iterator[TokenizedSource]:
    root = cache_root(cache_dir)
    for entry in entries:
        yield tokenized(resolve(entry, option), tokenizer, root)


def _weights(entries: Entries) -> list[float] | None:
    """The mixture's weights; None where no source has one: all rows are then one epoch."""
    mappings = [entry for entry in entries if not isinstance(entry, str)]
    return [float(entry["weight"]) for entry in mappings if entry.get("weight")] or None


def _refuse_empty(rows: Sequence[Rows], weights: Any, split: Split, data: DataConfig) -> None:
    # In a mixture each source must be able to give its share.
    empty = [one.name for one in rows if one.num_rows == 0]
    if not empty or (weights is None and len(empty) < len(rows)):
        return
    held = f"data.validation_fraction={data.validation_fraction}"
    if split == "validation" and not data.validation_sources:
        raise UsageError(
            f"{held} holds nothing back from {', '.join(empty)}; "
            "raise it, or set eval.every to null"
        )
    if not data.validation_sources and data.validation_fraction > 0:
        raise UsageError(
            f"{held} leaves nothing to train on in {', '.join(empty)}; lower it, or give more text"
        )
    raise UsageError(
        f"{', '.join(empty)}: no document is longer than one token, so there is nothing to predict"
    )


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Tokenizer:
    # Both splits need it, and a large one takes seconds to read.
    return load_tokenizer(name)
