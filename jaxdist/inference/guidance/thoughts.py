"""Thoughts before an answer that is held to a grammar: they are free, what follows them is not.

They stand between `<think>` and `</think>`, which may be tokens or spelled by several: bytes count.
No token is allowed that would run over the end of the thoughts, so a grammar begins with a token.
Shapes: k drafts, W = ceil(vocab_size / 32) words of bits.
"""

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import Protocol

import numpy as np

from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.guidance.guide import Matcher
from jaxdist.inference.guidance.token_bytes import token_bytes

BEGIN, END = "<think>", "</think>"


class Opening(Enum):
    """Where an answer begins."""

    BEFORE = "before thoughts, which it may open"
    INSIDE = "inside of thoughts that the prompt has opened"
    AFTER = "after thoughts, or where there are none"


class _GrammarMatcher(Matcher, Protocol):
    @property
    def is_complete(self) -> bool: ...


class _Grammar(Protocol):
    def matcher(self) -> _GrammarMatcher: ...


class AfterThoughts:
    """A grammar that binds what follows the thoughts.

    grammar: What `grammar.compile` gives. opening: BEFORE or INSIDE.
    """

    def __init__(self, grammar: _Grammar, tokenizer: Tokenizer, opening: Opening):
        self._grammar, self._marks, self._opening = grammar, _marks_of(tokenizer), opening

    def matcher(self) -> "ThinkingMatcher":
        """At the beginning of an answer."""
        return ThinkingMatcher(self._grammar, self._marks, self._opening)


class Marks:
    """How a vocabulary can spell the marks.

    Attributes:
        opening: Tokens that spell more of BEGIN, by how much of it stands there, uint32 [7, W].
        thinking: Tokens that do not run over END, by how much of it stands there, uint32 [8, W].
    """

    def __init__(self, tokens: Sequence[bytes]):
        """tokens: Bytes by id."""
        self._tokens, self._begin, self._end = tokens, BEGIN.encode(), END.encode()
        opens = np.zeros((len(BEGIN), len(tokens)), bool)
        thinks = np.ones((len(END), len(tokens)), bool)
        for token, text in enumerate(tokens):
            if text and text in self._begin:
                for i in range(len(BEGIN)):
                    opens[i, token] = self._begin[i:].startswith(text)
            if self._end[-1:] in text[:-1]:
                for i in range(len(END)):
                    _, mark, rest = (self._end[:i] + text).partition(self._end)
                    thinks[i, token] = not (mark and rest)
        self.opening, self.thinking = _packed(opens), _packed(thinks)

    def open(self, spelled: int, token: int) -> int | None:
        """How much of BEGIN stands there after `token`; None where it is something else."""
        text = self._tokens[token] if token < len(self._tokens) else b""
        return spelled + len(text) if self._begin[spelled:].startswith(text) else None

    def think(self, spelled: int, token: int) -> int | None:
        """How much of END may stand there after `token`; None where the thoughts have ended."""
        text = self._end[:spelled] + (self._tokens[token] if token < len(self._tokens) else b"")
        if self._end in text:
            return None
        return next(i for i in range(len(END) - 1, -1, -1) if text.endswith(self._end[:i]))


class ThinkingMatcher:
    """Where an answer stands: before its thoughts, in them, or in the grammar of what follows."""

    def __init__(self, grammar: _Grammar, marks: Marks, opening: Opening):
        self._grammar, self._marks, self._at = grammar, marks, opening
        self._spelled = 0  # of the mark that may come next
        self._inner = grammar.matcher()  # at its beginning as long as the thoughts last

    @property
    def is_finished(self) -> bool:
        """Whether no token but the end may follow."""
        if self._at is Opening.BEFORE:  # what is no answer may still open thoughts
            return self._inner.is_finished and self._inner.is_complete
        return self._at is Opening.AFTER and self._inner.is_finished

    def masks(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, int]:
        """(allowed tokens before each draft and after the last that is allowed, uint32
        [1 + at most k, W]; how many drafts, from the first, are allowed)."""
        if self._at is Opening.BEFORE:  # for a few tokens: none of them is guessed
            return self._inner.masks()[0] | self._marks.opening[self._spelled], 0
        spelled = self._spelled if self._at is Opening.INSIDE else None
        free: list[np.ndarray] = []
        for draft in drafts:
            if spelled is None:
                break
            free.append(self._marks.thinking[spelled])
            if not free[-1][draft // 32] >> np.uint32(draft % 32) & np.uint32(1):
                return np.stack(free), len(free) - 1
            spelled = self._marks.think(spelled, draft)
        count = len(free)
        if spelled is not None:
            return np.stack([*free, self._marks.thinking[spelled]]), count
        masks, more = self._inner.masks(drafts[count:])
        return np.vstack([*free, masks]), count + more

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens follow."""
        for token in token_ids:
            if self._at is Opening.INSIDE:
                self._think(token)
            else:
                self._inner.advance([token])
                if self._at is Opening.BEFORE:
                    self._open(token)

    def _think(self, token: int) -> None:
        spelled = self._marks.think(self._spelled, token)
        self._spelled = spelled or 0
        if spelled is None:
            self._at = Opening.AFTER

    def _open(self, token: int) -> None:
        spelled = self._marks.open(self._spelled, token)
        self._spelled = spelled or 0
        if spelled is None:
            self._at = Opening.AFTER
        elif spelled == len(BEGIN):
            self._at, self._spelled, self._inner = Opening.INSIDE, 0, self._grammar.matcher()


def _packed(allowed: np.ndarray) -> np.ndarray:
    """bool [..., vocab_size] as bits, uint32 [..., W]."""
    padding = [(0, 0)] * (allowed.ndim - 1) + [(0, -allowed.shape[-1] % 32)]
    return np.packbits(np.pad(allowed, padding), axis=-1, bitorder="little").view("<u4")


@lru_cache(maxsize=4)
def _marks_of(tokenizer: Tokenizer) -> Marks:
    return Marks(token_bytes(tokenizer).tokens)
