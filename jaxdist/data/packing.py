"""Documents to rows: the arithmetic of cutting, packing and holding back, on lengths alone.

A document of n tokens holds n - 1 transitions (a token and the one it predicts). It is cut into
pieces of at most T input tokens; a piece's last label is the first token of the next piece (one
token of look-ahead), so that every transition is in exactly one piece. Pieces of several documents
share a row of T, as segments that neither attend to nor predict one another.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Documents are held back for validation in this order, the same whatever a run's seed is.
HOLD_BACK_SEED = 20240410


class Batch(NamedTuple):
    """Rows as the training step takes them; int32 arrays of shape [rows, T].

    Attributes:
        tokens: Input ids; 0 in padding.
        labels: The token that follows each input; 0 in padding.
        loss_mask: 1 where the label counts, 0 in padding.
        segment_ids: 1, 2, ... for the pieces of a row; 0 in padding.
        positions: From 0 in each piece; 0 in padding.
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray

    @classmethod
    def empty(cls, num_rows: int, length: int) -> "Batch":
        """Rows of nothing but padding."""
        return cls(*(np.zeros((num_rows, length), np.int32) for _ in cls._fields))


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Runs of tokens, each of one document.

    Attributes:
        begin: First token.  # [spans]
        end: One past the last; a span holds end - begin - 1 transitions.  # [spans]
    """

    begin: np.ndarray
    end: np.ndarray


@dataclass(frozen=True, kw_only=True)
class RowTable:
    """Which pieces make up each row.

    Attributes:
        begin: First input token of each piece, in the order of the rows.  # [pieces]
        length: Number of its inputs.  # [pieces]
        first: Index of each row's first piece, and at the end the number of pieces.  # [rows + 1]
    """

    begin: np.ndarray
    length: np.ndarray
    first: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1


def hold_back(offsets: np.ndarray, fraction: float) -> tuple[Spans, Spans]:
    """(training, validation): documents drawn until `fraction` of the transitions is held back.

    The last one drawn is split, its end going to validation, so that the fraction holds to the
    token even where the text is a single document. Each transition is on exactly one side.
    """
    begin, end = np.asarray(offsets[:-1], np.int64), np.asarray(offsets[1:], np.int64)
    transitions = np.maximum(end - begin - 1, 0)
    quota = round(fraction * int(transitions.sum()))
    order = np.random.default_rng(HOLD_BACK_SEED).permutation(len(begin))
    reached = np.cumsum(transitions[order])
    num_drawn = int(np.searchsorted(reached, quota)) + 1 if quota else 0
    drawn = order[:num_drawn]
    held = np.zeros(len(begin), bool)
    held[drawn] = True
    if num_drawn == 0:
        return Spans(begin=begin, end=end), Spans(begin=begin[:0], end=end[:0])
    last, surplus = drawn[-1], int(reached[num_drawn - 1]) - quota
    cut = (
        begin[last] + surplus
    )  # the first `surplus` transitions of the last document stay in training
    training_end = end[~held]
    training_begin = begin[~held]
    if surplus:
        training_begin = np.append(training_begin, begin[last])
        training_end = np.append(training_end, cut + 1)
    held_begin = begin.copy()
    held_begin[last] = cut
    drawn = np.sort(drawn)
    return Spans(begin=training_begin, end=training_end), Spans(
        begin=held_begin[drawn], end=end[drawn]
    )


def cut(spans: Spans, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(begin, number of inputs) of the pieces, of at most `length` inputs.

    Spans without a transition give none.
    """
    transitions = np.maximum(spans.end - spans.begin - 1, 0)
    num_pieces = -(-transitions // length)
    span = np.repeat(np.arange(len(transitions)), num_pieces)
    in_span = np.arange(len(span)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    begin = spans.begin[span] + in_span * length
    return begin, np.minimum(transitions[span] - in_span * length, length).astype(np.int32)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The row of each piece, by best-fit decreasing: each goes where the least room is left for it.

    Pieces of one length are placed together (a row with room for k of them takes k), so that the
    cost grows with the number of different lengths and not of pieces. Source: "Fewer Truncations
    Improve Language Modeling", arXiv 2404.10830, section 3. lengths [pieces], each from 1 to
    capacity -> [pieces], rows from 0.
    """
    row_of = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    values, starts = np.unique(-lengths[order], return_index=True)
    with_room: dict[int, list[np.ndarray]] = {}  # room that is left -> rows
    has_room = np.zeros(capacity + 1, bool)
    num_rows = 0
    ends = np.append(starts, len(order))[1:]
    for value, start, end in zip((-values).tolist(), starts, ends, strict=True):
        group = order[start:end]
        rooms = (np.flatnonzero(has_room[value:]) + value).tolist()
        for room in [*rooms, capacity]:
            if not len(group):
                break
            each = room // value
            needed = -(-len(group) // each)
            if room == capacity:
                rows = np.arange(num_rows, num_rows + needed)
                num_rows += needed
            else:
                rows = np.concatenate(with_room.pop(room))
                has_room[room] = False
            used = rows[:needed]
            placed = group[: len(used) * each]
            row_of[placed] = np.repeat(used, each)[: len(placed)]
            group = group[len(placed) :]
            num_full, in_last = divmod(len(placed), each)
            for left, its_rows in (
                (room - each * value, used[:num_full]),
                (room - in_last * value, used[num_full:]),
                (room, rows[needed:]),
            ):
                if left and len(its_rows):
                    with_room.setdefault(left, []).append(its_rows)
                    has_room[left] = True
    return row_of


def row_table(spans: Spans, length: int, pack: bool) -> RowTable:
    """Rows of at most `length` inputs; without `pack` each piece has a row of its own."""
    begin, inputs = cut(spans, length)
    row_of = best_fit(inputs, length) if pack else np.arange(len(inputs))
    order = np.argsort(row_of, kind="stable")
    num_rows = int(row_of.max()) + 1 if len(row_of) else 0
    first = np.searchsorted(row_of[order], np.arange(num_rows + 1))
    return RowTable(begin=begin[order], length=inputs[order], first=first)


def write_row(table: RowTable, row: int, tokens: np.ndarray, out: Batch, at: int) -> None:
    """Fill row `at` of `out`, which is empty, with the table's row number `row`."""
    column = 0
    for segment, piece in enumerate(range(table.first[row], table.first[row + 1]), 1):
        begin, count = int(table.begin[piece]), int(table.length[piece])
        where = slice(column, column + count)
        out.tokens[at, where] = tokens[begin : begin + count]
        out.labels[at, where] = tokens[begin + 1 : begin + count + 1]
        out.loss_mask[at, where] = 1
        out.segment_ids[at, where] = segment
        out.positions[at, where] = np.arange(count)
        column += count
