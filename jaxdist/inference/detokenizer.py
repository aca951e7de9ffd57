"""Text of a growing list of tokens, for streaming."""

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 3  # a UTF-8 character has four bytes, so at most three wait for the last one


class Decoder(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str: ...


class TextStream:
    """Turns tokens into pieces of text that never split a character.

    The pieces joined are the decoded whole, less the decoded prompt. The whole is decoded for each
    token, since what a token adds may depend on those before it (spaces, parts of characters).
    """

    def __init__(
        self, tokenizer: Decoder, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ):
        self._tokenizer = tokenizer
        self._ids = list(prompt)
        self._num_given = len(tokenizer.decode(self._ids))

    def push(self, token: int) -> str:
        """The text that is certain now; a character that lacks bytes waits."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        end = len(text)
        while end > max(self._num_given, len(text) - _MOST_UNFINISHED):
            if text[end - 1] != _UNFINISHED:
                break
            end -= 1
        return self._give(text[:end])

    def finish(self) -> str:
        """What waited for bytes that did not come."""
        return self._give(self._tokenizer.decode(self._ids))

    def _give(self, text: str) -> str:
        piece = text[self._num_given :]
        self._num_given += len(piece)
        return piece
