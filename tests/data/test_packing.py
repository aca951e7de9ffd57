"""Every transition in exactly one place, nothing across documents: against a slow, plain twin."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data.packing import (
    Batch,
    Spans,
    best_fit,
    cut,
    hold_back,
    row_table,
    write_row,
)

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=30)


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def transitions_of(lengths: list[int]) -> list[int]:
    """Each transition, named by its input token; a document has one less than tokens."""
    offsets = offsets_of(lengths)
    return [token for i, n in enumerate(lengths) for token in range(offsets[i], offsets[i] + n - 1)]


def all_rows(spans: Spans, num_tokens: int, length: int, pack: bool) -> Batch:
    """All rows of a text whose token i is the number i."""
    table = row_table(spans, length, pack)
    batch = Batch.empty(table.num_rows, length)
    for row in range(table.num_rows):
        write_row(table, row, np.arange(num_tokens, dtype=np.uint16), batch, row)
    return batch


@given(LENGTHS, st.integers(1, 16), st.booleans())
@settings(deadline=None)
def test_each_transition_once_and_none_across_documents(lengths: list[int], T: int, pack: bool):
    offsets = offsets_of(lengths)
    batch = all_rows(Spans(begin=offsets[:-1], end=offsets[1:]), offsets[-1], T, pack)
    counted = batch.loss_mask == 1
    assert sorted(batch.tokens[counted].tolist()) == transitions_of(lengths)
    np.testing.assert_array_equal(batch.labels[counted], batch.tokens[counted] + 1)
    np.testing.assert_array_equal(batch.segment_ids > 0, counted)
    for field in batch:
        assert field.dtype == np.int32 and not field[~counted].any()
    document = np.searchsorted(offsets, np.arange(offsets[-1]), side="right")
    for tokens, segments, positions, mask in zip(
        batch.tokens, batch.segment_ids, batch.positions, batch.loss_mask, strict=True
    ):
        used = int(mask.sum())
        assert used and mask[:used].all(), "padding stands at the end of a row, and no row is empty"
        names = np.unique(segments[:used])
        assert names.tolist() == list(range(1, len(names) + 1))
        assert pack or len(names) == 1
        for segment in names:
            inside = tokens[segments == segment]
            assert len(set(document[inside])) == 1, "a segment reaches over two documents"
            np.testing.assert_array_equal(np.diff(inside), 1)
            np.testing.assert_array_equal(positions[segments == segment], np.arange(len(inside)))


@given(LENGTHS, st.floats(0, 1))
@settings(deadline=None)
def test_held_back_and_kept_are_all_and_disjoint(lengths: list[int], fraction: float):
    every = transitions_of(lengths)
    sides = hold_back(offsets_of(lengths), fraction)
    kept, held = (
        [i for b, e in zip(side.begin, side.end, strict=True) for i in range(b, e - 1)]
        for side in sides
    )
    assert sorted(kept + held) == every
    assert len(held) == round(fraction * len(every))


def test_a_single_document_gives_its_end():
    kept, held = hold_back(np.array([0, 101]), 0.1)
    assert (kept.begin.tolist(), kept.end.tolist()) == ([0], [91])
    assert (held.begin.tolist(), held.end.tolist()) == ([90], [101])


def test_held_back_documents_are_whole_but_one():
    offsets = np.arange(0, 1001, 10)
    kept, held = hold_back(offsets, 0.25)
    whole = np.isin(held.begin, offsets) & np.isin(held.end, offsets)
    assert len(held.begin) == 25 and whole.sum() >= 24
    assert np.ptp(held.begin) > 700, "documents are drawn from all over the text"


def test_pieces_of_a_long_document_look_one_token_ahead():
    begin, inputs = cut(Spans(begin=np.array([5]), end=np.array([5 + 11])), 4)
    assert (begin.tolist(), inputs.tolist()) == ([5, 9, 13], [4, 4, 2])


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The slow twin: one piece at a time, longest first, into the fullest row with room."""
    room: list[int] = []
    row_of = [0] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [r for r in range(len(room)) if room[r] >= lengths[i]]
        row = min(fitting, key=lambda r: room[r], default=len(room))
        if row == len(room):
            room.append(capacity)
        room[row] -= lengths[i]
        row_of[i] = row
    return row_of


@given(st.data(), st.integers(1, 40))
@settings(deadline=None)
def test_best_fit_fills_rows_as_the_plain_one(data: st.DataObject, capacity: int):
    lengths = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=60))
    rows = best_fit(np.array(lengths, np.int32), capacity)
    plain = plain_best_fit(lengths, capacity)
    fill = np.bincount(rows, weights=lengths)
    assert fill.max() <= capacity
    assert sorted(fill) == sorted(np.bincount(plain, weights=lengths))


@pytest.mark.parametrize("pack", [True, False])
def test_no_text_gives_no_rows(pack: bool):
    nothing = np.array([], np.int64)
    assert row_table(Spans(begin=nothing, end=nothing), 8, pack).num_rows == 0
    assert row_table(Spans(begin=np.array([0]), end=np.array([1])), 8, pack).num_rows == 0


def test_packing_is_close_to_full_and_quick():
    lengths = np.maximum(np.random.default_rng(0).exponential(300, 300_000), 2).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = row_table(Spans(begin=offsets[:-1], end=offsets[1:]), 2048, True)
    assert table.length.sum() / (table.num_rows * 2048) > 0.999
