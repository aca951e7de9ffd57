"""What the host says about the next tokens of a request: guesses, and which are allowed.

Shapes: k guesses, W = ceil(vocab_size / 32) words of bits.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxdist.data.tokenizer import Tokenizer
from jaxdist.inference.guidance.speculation import NgramIndex

_ALL = np.uint32(0xFFFFFFFF)


class Matcher(Protocol):
    """Where a text stands in a grammar."""

    @property
    def is_finished(self) -> bool:
        """Whether no token but the end may follow."""
        ...

    def masks(self, drafts: Sequence[int] = ()) -> tuple[np.ndarray, int]:
        """(allowed tokens before each draft and after the last, uint32 [1 + k, W]; drafts that
        the grammar allows)."""
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens follow."""
        ...


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The token sequences that spell each word, at a text's begin and after a space."""
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, " " + bare):
            ids = tuple(tokenizer.encode(text))
            if ids:
                spelled[ids] = None
    return list(spelled)


class Guide:
    """Guesses and masks for one request.

    matcher: Holds the text to a grammar. bad_words: Token sequences that do not appear. ngrams:
    Makes guesses, at most `most_drafts` at a time.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        matcher: Matcher | None = None,
        bad_words: Sequence[tuple[int, ...]] = (),
        ngrams: NgramIndex | None = None,
        most_drafts: int = 0,
    ):
        self._matcher, self._ngrams, self._most_drafts = matcher, ngrams, most_drafts
        self._num_words = -(-vocab_size // 32)
        self._endings: dict[int, list[tuple[int, ...]]] = {}  # banned last token: those before it
        self._allowed: np.ndarray | None = None
        if bad_words:
            self._allowed = np.full(self._num_words, _ALL)
            for *before, last in bad_words:
                if before:
                    self._endings.setdefault(last, []).append(tuple(before))
                else:
                    _ban(self._allowed, last)

    @property
    def guesses(self) -> bool:
        """Whether it continues the last token, which must be known before the row is computed."""
        return self._ngrams is not None

    @property
    def follows(self) -> bool:
        """Whether what may follow depends on the last token, which is known before sampling."""
        return self._matcher is not None or bool(self._endings)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar allows nothing but the end."""
        return self._matcher is not None and self._matcher.is_finished

    def advance(self, token_ids: Sequence[int]) -> int:
        """These tokens were sampled: how many of them belong to the text.

        The end that is sampled after a guess which completes the text does not: without guesses
        nothing would have been sampled there.
        """
        if self._matcher is None:
            return len(token_ids)
        for count, token in enumerate(token_ids):
            if self._matcher.is_finished:
                return count
            self._matcher.advance([token])
        return len(token_ids)

    def shape(
        self, tokens: Sequence[int], num_prompt: int, most: int
    ) -> tuple[Sequence[int], np.ndarray | None] | None:
        """At most `most` guesses at what follows `tokens`, and masks uint32 [1 + k, W].

        num_prompt: How many of the tokens are the prompt's, which may hold what is bad. None where
        nothing may follow.
        """
        drafts: Sequence[int] = ()
        if self._ngrams is not None:
            drafts = self._ngrams.propose(tokens, min(most, self._most_drafts))
        masks = None
        if self._matcher is not None:
            masks, num_allowed = self._matcher.masks(drafts)
            drafts = drafts[:num_allowed]
            masks = masks[: num_allowed + 1, : self._num_words]
        if self._allowed is not None:
            allowed = np.tile(self._allowed, (len(drafts) + 1, 1))
            self._ban_endings(allowed, [*tokens[num_prompt:], *drafts])
            masks = allowed if masks is None else masks & allowed
        if masks is not None:
            # Up to the first draft after which nothing may follow: there the text would end.
            count = next((i for i, row in enumerate(masks) if not row.any()), len(masks))
            if not count:
                return None
            drafts, masks = drafts[: count - 1], masks[:count]
        return drafts, masks

    def _ban_endings(self, allowed: np.ndarray, output: Sequence[int]) -> None:
        for i, row in enumerate(allowed):
            end = len(output) - len(allowed) + 1 + i
            for last, befores in self._endings.items():
                for before in befores:
                    if end >= len(before) and tuple(output[end - len(before) : end]) == before:
                        _ban(row, last)
                        break


def _ban(row: np.ndarray, token: int) -> None:
    if token // 32 < len(row):
        row[token // 32] &= ~(np.uint32(1) << np.uint32(token % 32))
