"""Text of a growing list of tokens, for streaming."""

from collections.abc import Sequence
from functools import partial

from jaxdist.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_MOST_UNFINISHED = 3  # a UTF-8 character has four bytes, so at most three wait for the last one
_CONTEXT = 4  # tokens of the prompt that the first one is decoded with
_MOST_CONTEXT = 64  # where fewer have no text
_STEP = 2  # tokens after which the window moves on
_LONG = 24  # tokens after which it is cut in a text that never ends in a whole character


class TextStream:
    """Turns tokens into pieces of text that never split a character.

    The pieces joined are the decoded whole, less the decoded prompt. What a token adds may depend
    on those before it (spaces, parts of characters), so a window of the last tokens is decoded: a
    context whose text is given already, and what came after it. The window moves on where its text
    ends in a whole character; the new context is all that came after the old one, provided that it
    has text, since a decoder may leave out a space where its text begins.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool = True
    ):
        self._decode = tokenizer.decode
        if not skip_special_tokens:
            self._decode = partial(tokenizer.decode, skip_special_tokens=False)
        self._ids, self._text = self._context(prompt)
        self._num_context = len(self._ids)
        self._num_given = len(self._text)  # characters of the window's text

    def push(self, token: int) -> str:
        """The text that is certain now; a character that lacks bytes waits."""
        ids = self._ids
        ids.append(token)
        old, text = self._text, self._decode(ids)
        if text.endswith(_UNFINISHED):
            piece = self._give(text[: self._certain(text)])
            self._text = text
            if not (len(ids) - self._num_context) % _LONG:
                self._cut(text)
            return piece
        if text == old and (text or len(ids) > _MOST_CONTEXT):
            ids.pop()  # a special token: nothing depends on it, and there may be many
            return self._give(text)
        piece = self._give(text)
        if len(ids) - self._num_context >= _STEP:
            context = self._decode(ids[self._num_context :])
            if context:
                del ids[: self._num_context]
                # More may be given than there is: the prompt began a character that got whole.
                self._num_given += len(context) - len(text)
                self._num_context, self._text = len(ids), context
        return piece

    def finish(self) -> str:
        """What waited for bytes that did not come."""
        return self._give(self._decode(self._ids))

    def _certain(self, text: str) -> int:
        """Characters of `text` before those that may wait for bytes."""
        end, least = len(text), max(self._num_given, len(text) - _MOST_UNFINISHED)
        while end > least and text[end - 1] == _UNFINISHED:
            end -= 1
        return end

    def _give(self, text: str) -> str:
        piece = text[self._num_given :]
        self._num_given += len(piece)
        self._text = text
        return piece

    def _cut(self, text: str) -> None:
        """Move on although the text ends inside a character, where no character is split."""
        ids, first = self._ids, self._num_context
        for end in range(len(ids) - _MOST_UNFINISHED - 1, first, -1):
            head, context = self._decode(ids[:end]), self._decode(ids[first:end])
            if context and self._decode(ids[first:]) == context + text[len(head) :]:
                self._num_given += len(context) - len(head)
                self._num_context, self._text = end - first, context + text[len(head) :]
                del ids[:first]
                return

    def _context(self, prompt: Sequence[int]) -> tuple[list[int], str]:
        """A short end of the prompt that has text and does not begin inside a character."""
        count = _CONTEXT
        while True:
            ids = list(prompt[-count:])
            text = self._decode(ids)
            whole = text and text[0] != _UNFINISHED
            if whole or count >= min(len(prompt), _MOST_CONTEXT):
                return ids, text
            count *= 2
