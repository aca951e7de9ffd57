"""Special tokens of a vocabulary in text: found in what a template writes, hidden in what users do.

A chat is rendered to one text, in which the template's `<|im_end|>` and a user's look alike. So the
user's are disguised before: one character of each is replaced by one that occurs nowhere, and put
back when the text has been split at the special tokens that are left, the template's own.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from jaxdist.data.tokenizer import JsonTokenizer, SentencePieceTokenizer, Tokenizer

_FIRST_SUBSTITUTE, _LAST_SUBSTITUTE = 0x100000, 0x10FFFD  # Unicode's last private plane


class SpecialTokens:
    """The special tokens of a tokenizer, by their text."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self.ids = _special_ids(tokenizer)
        self._lengths: dict[str, list[int]] = {}
        for text in sorted(self.ids, key=len, reverse=True):
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        self._starts = re.compile("|".join(map(re.escape, self._lengths)) or "(?!)")
        self._prefixes = {text[:end] for text in self.ids for end in range(1, len(text))}
        self._suffixes = {text[start:] for text in self.ids for start in range(1, len(text))}
        self._longest = max(map(len, self.ids), default=0)
        self._strips = _strips(tokenizer)
        self._after_special = _encoder_after_special(tokenizer, self.ids)

    def find(self, text: str) -> Iterator[tuple[int, str]]:
        """Where a special token is spelled, and the longest one there; they may overlap."""
        for start in self._starts.finditer(text):
            at = start.start()
            for length in self._lengths[text[at]]:
                if text[at : at + length] in self.ids:
                    yield at, text[at : at + length]
                    break

    def encode(self, text: str, disguise: "Disguise") -> list[int]:
        """Ids of a rendered text: special tokens where they are spelled, all else as plain text."""
        ids: list[int] = []
        end = 0
        for at, token in self.find(text):
            if at >= end:
                ids += self._plain(text[end:at], disguise, ids, token)
                ids.append(self.ids[token])
                end = at + len(token)
        return ids + self._plain(text[end:], disguise, ids, None)

    def encode_raw(self, text: str) -> list[int]:
        """Ids of a text that may spell special tokens, as its writer has said."""
        return self.encode(text, Disguise(self, ()))

    def _plain(
        self, text: str, disguise: "Disguise", before: list[int], after: str | None
    ) -> list[int]:
        left = self._strips.get(before[-1]) if before else None
        right = self._strips.get(self.ids[after]) if after else None
        if left and left[1]:
            text = text.lstrip()
        if right and right[0]:
            text = text.rstrip()
        if not text:
            return []
        shown = disguise.lift(text)
        if before and self._after_special and shown == text:
            return self._after_special(text)
        return self._tokenizer.encode(shown)


class Disguise:
    """Hides the special tokens in texts of one request.

    texts: All that will be hidden in; substitutes are characters that none of them has.
    """

    def __init__(self, tokens: SpecialTokens, texts: Iterable[str]):
        self._tokens = tokens
        taken = {char for text in texts for char in text if ord(char) >= _FIRST_SUBSTITUTE}
        self._free = (
            chr(code)
            for code in range(_FIRST_SUBSTITUTE, _LAST_SUBSTITUTE)
            if chr(code) not in taken
        )
        self._substitutes: dict[str, str] = {}

    def hide(self, text: str, *, whole: bool = False) -> str:
        """`text` in which no special token is spelled, nor is one where other text stands beside.

        whole: Also disguise a text that is the inside of a special token, as in `<|` + text + `|>`.
        """
        tokens = self._tokens
        hidden = {at for at, _ in tokens.find(text)}
        reach = tokens._longest
        for start in range(max(0, len(text) - reach), len(text)):
            if text[start:] in tokens._prefixes:
                hidden.add(start)
        for end in range(1, min(reach, len(text) + 1)):
            if text[:end] in tokens._suffixes:
                hidden.add(end - 1)
        if whole and text.strip() and len(text) < reach and any(text in t for t in tokens.ids):
            hidden.add(len(text) - len(text.lstrip()))
        if not hidden:
            return text
        chars = list(text)
        for at in hidden:
            chars[at] = self._substitute(chars[at])
        return "".join(chars)

    def lift(self, text: str) -> str:
        """`text` as it was."""
        if not self._substitutes:
            return text
        back = {ord(substitute): char for char, substitute in self._substitutes.items()}
        return text.translate(back)

    def _substitute(self, char: str) -> str:
        if char not in self._substitutes:
            self._substitutes[char] = next(self._free)
        return self._substitutes[char]


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    inner: Any = getattr(tokenizer, "_inner", None)
    if isinstance(tokenizer, JsonTokenizer):
        added = inner.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if token.special and token.content}
    if isinstance(tokenizer, SentencePieceTokenizer):
        return {inner.id_to_piece(i): i for i in range(tokenizer.vocab_size) if inner.is_control(i)}
    return {}


def _strips(tokenizer: Tokenizer) -> dict[int, tuple[bool, bool]]:
    """Special tokens that swallow the spaces to their (left, right)."""
    if not isinstance(tokenizer, JsonTokenizer):
        return {}
    inner: Any = getattr(tokenizer, "_inner", None)
    return {
        i: (token.lstrip, token.rstrip)
        for i, token in inner.get_added_tokens_decoder().items()
        if token.lstrip or token.rstrip
    }


def _encoder_after_special(tokenizer: Tokenizer, ids: dict[str, int]) -> Any:
    """How text is encoded that follows a special token, where that differs from a text's begin.

    It does where a space is put before the first word of a text only.
    """
    inner: Any = getattr(tokenizer, "_inner", None)
    if not isinstance(tokenizer, JsonTokenizer) or not ids:
        return None
    settings = inner.to_str()
    if '"prepend_scheme":"first"' not in settings.replace(" ", ""):
        return None
    copy = type(inner).from_str(settings)
    copy.encode_special_tokens = False
    anchor = next(iter(ids))

    def encode(text: str) -> list[int]:
        return copy.encode(anchor + text, add_special_tokens=False).ids[1:]

    return encode
