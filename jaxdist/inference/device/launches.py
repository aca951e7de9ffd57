"""How the rows of a step become launches: pieces of equally many queries, packed for a shape.

Plain Python and numpy. A sequence's pieces stand in the order of its tokens, in one launch or in
successive ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from jaxdist.inference.device.buckets import PROMPT_QUERIES, Buckets, Shape
from jaxdist.inference.device.step_data import StepData
from jaxdist.inference.scheduling.step import Row


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Tokens of row number `row` of the step, from its token `first` on."""

    row: int
    first: int
    count: int
    samples: int  # tokens to sample after the last ones


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One program's run. `places` are the rows of the packed array where the pieces stand."""

    shape: Shape
    pieces: Sequence[Piece]
    places: Sequence[int]
    packed: np.ndarray

    def place_among(self, place: int, num_rows: int) -> int:
        """Where the row at `place` is among results of which each replica has more."""
        own = self.shape.rows
        return place // own * (num_rows // (len(self.packed) // own)) + place % own

    def masks(self, rows: Sequence[Row], num_words: int) -> np.ndarray | None:
        """Allowed tokens, uint32 [D * B, X, num_words]; None where no row has masks."""
        if all(rows[p.row].masks is None or not p.samples for p in self.pieces):
            return None
        size = (len(self.packed), self.shape.scored, num_words)
        masks = np.full(size, 0xFFFFFFFF, np.uint32)
        for piece, place in zip(self.pieces, self.places, strict=True):
            own = rows[piece.row].masks
            if own is not None and piece.samples:
                masks[place, : len(own), : own.shape[1]] = own
        return masks


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Cuts steps into launches for replicas of `num_slots` slots each."""

    buckets: Buckets
    num_replicas: int
    num_slots: int

    def of(self, rows: Sequence[Row], whole: Callable[[Row], bool]) -> list[Launch]:
        """The launches of a step.

        whole: Tells rows whose every position is looked at, which run as prompts.
        """
        groups: dict[int, list[Piece]] = {}
        for number, row in enumerate(rows):
            for queries, piece in self._pieces(number, row, whole(row)):
                groups.setdefault(queries, []).append(piece)
        # Prompts first: what follows a row's guesses may be in another group than its beginning.
        return [
            self._pack(rows, pieces, queries)
            for queries in sorted(groups, reverse=True)
            for pieces in self._dealt(rows, groups[queries], self.buckets.most_rows(queries))
        ]

    def _pieces(self, number: int, row: Row, whole: bool) -> list[tuple[int, Piece]]:
        """A row's pieces, each with the queries of its program."""
        total, samples = len(row.token_ids), row.num_drafts + 1 if row.sample else 0
        guessed = 1 + self.buckets.max_drafts
        # The programs for prompts score one position of a row, so guesses go to their own.
        tail = samples if samples > 1 else 0
        if not whole and total <= guessed:
            tail = total
        cuts = [*range(0, total - tail, PROMPT_QUERIES), total - tail]
        found = [
            (PROMPT_QUERIES, Piece(row=number, first=first, count=last - first, samples=0))
            for first, last in zip(cuts, cuts[1:], strict=False)
        ]
        if tail:
            queries = 1 if tail == 1 else guessed
            piece = Piece(row=number, first=total - tail, count=tail, samples=samples)
            return [*found, (queries, piece)]
        queries, last = found.pop()
        return [
            *found,
            (queries, Piece(row=number, first=last.first, count=last.count, samples=samples)),
        ]

    def _dealt(self, rows: Sequence[Row], pieces: list[Piece], most: int) -> list[list[Piece]]:
        """Pieces in launches of at most `most` rows of each replica."""
        launches: list[list[Piece]] = []
        counts = [0] * self.num_replicas
        for piece in pieces:
            replica = rows[piece.row].slot // self.num_slots
            number = counts[replica] // most
            counts[replica] += 1
            if number == len(launches):
                launches.append([])
            launches[number].append(piece)
        return launches

    def _pack(self, rows: Sequence[Row], pieces: list[Piece], queries: int) -> Launch:
        replicas = [rows[piece.row].slot // self.num_slots for piece in pieces]
        most = max(replicas.count(replica) for replica in set(replicas))
        shape = self.buckets.fit(most, queries, max(len(rows[p.row].block_table) for p in pieces))
        packed = StepData.padding(self.num_replicas, self.num_slots, shape)
        data = StepData.of(packed, shape)
        free = [replica * shape.rows for replica in range(self.num_replicas)]
        places = []
        for piece, replica in zip(pieces, replicas, strict=True):
            place, row = free[replica], rows[piece.row]
            free[replica] += 1
            places.append(place)
            data.tokens[place, : piece.count] = row.token_ids[
                piece.first : piece.first + piece.count
            ]
            data.tables[place, : len(row.block_table)] = row.block_table
            data.positions[place] = row.position + piece.first
            data.counts[place] = piece.count
            data.slots[place] = row.slot % self.num_slots
            data.samples[place] = piece.samples
        return Launch(shape=shape, pieces=pieces, places=places, packed=packed)
