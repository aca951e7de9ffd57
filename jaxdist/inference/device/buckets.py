"""The shapes that steps are padded to, so that a bounded list of programs serves every step.

A program computes some rows of equally many queries. Three kinds of work use it:
- decoding: rows of one query, of as many sequences;
- guesses to check: rows of 1 + max_drafts queries;
- prompts: a chunk is cut into rows of `PROMPT_QUERIES`, one after the other, of one block table.
  Keys and values are written before any row attends, so a row sees those before it.
"""

from dataclasses import dataclass

PROMPT_QUERIES = 32
WIDTHS = (512, 4096)  # blocks of a table; longer tables cost little, attention reads no further


@dataclass(frozen=True, order=True)
class Shape:
    """A program: `rows` of a replica, `queries` a row of which `scored` give logits, the width of
    block tables."""

    rows: int
    queries: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.queries} tokens, {self.width} blocks"

    @property
    def scored(self) -> int:
        """Positions of a row that give logits: of a prompt the last, else all."""
        return 1 if self.queries == PROMPT_QUERIES else self.queries


@dataclass(frozen=True, kw_only=True)
class Buckets:
    """What shapes there are, by what a step may ask for at most.

    Attributes:
        max_rows: Sequences of a replica.
        max_drafts: Guesses in a row.
        max_tokens: Tokens of prompts that one program takes.
        max_width: Blocks of a sequence.
    """

    max_rows: int
    max_drafts: int
    max_tokens: int
    max_width: int

    @property
    def shapes(self) -> list[Shape]:
        """Every program there is, small ones first."""
        rows = _powers(self.max_rows)
        kinds = [(1, rows), (PROMPT_QUERIES, _powers(self.max_prompt_rows))]
        if self.max_drafts:
            kinds.append((1 + self.max_drafts, rows))
        return [
            Shape(n, queries, width)
            for queries, numbers in kinds
            for n in numbers
            for width in self.widths
        ]

    @property
    def widths(self) -> list[int]:
        """Widths of block tables."""
        return [w for w in WIDTHS if w < self.max_width] + [self.max_width]

    @property
    def max_prompt_rows(self) -> int:
        """Rows of prompts in one program."""
        return 1 << (-(-self.max_tokens // PROMPT_QUERIES) - 1).bit_length()

    def most_rows(self, queries: int) -> int:
        """Rows of one program of so many queries."""
        return self.max_prompt_rows if queries == PROMPT_QUERIES else self.max_rows

    def sampler_rows(self, rows: int) -> int:
        """Rows of the program that samples by parameters for so many, where rows are cheap.

        It takes longest of all to compile, so several shapes share one.
        """
        most = max(_powers(self.max_rows)[-1], self.max_prompt_rows)
        return next((n for n in (4, 16, 64) if rows <= n < most), most)

    def fit(self, rows: int, queries: int, width: int) -> Shape:
        """The smallest shape that takes them."""
        return Shape(
            next(n for n in _powers(self.most_rows(queries)) if n >= rows),
            queries,
            next(w for w in self.widths if w >= width),
        )


def _powers(most: int) -> list[int]:
    """Powers of two up to the first that is at least `most`."""
    return [1 << n for n in range((most - 1).bit_length() + 1)]
