"""The keyword arguments of a call in Python's notation, as the JSON object that they are."""

import json
import re
from dataclasses import dataclass
from string import hexdigits

_WORDS = {"True": "true", "False": "false", "None": "null"}
_SAME = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_ESCAPES = {"'": "'", "\n": ""} | {char: f"\\{char}" for char in '"\\/nrtbf'}
_DIGITS = {"x": 2, "u": 4}  # hexadecimal ones of an escape


@dataclass
class _Open:
    """The call, or a container in it."""

    closing: str
    key_end: str = ""  # none in a list
    num_members: int = 0


_CONTAINERS = {"[": ("]", ""), "(": ("]", ""), "{": ("}", ":")}


class Keywords:
    """Reads what stands after a call's `(`, up to its `)`; what is no literal is taken for a text.

    Attributes:
        done: Whether the `)` was read.
    """

    def __init__(self):
        self.done = False
        self._open = [_Open("}", "=")]
        self._next = "key"  # or its end, a value, or the end of a member
        self._word, self._nesting = "", 0  # what was read of a bare one, and brackets open in it
        self._quote, self._escape = "", ""  # of the string that is read; its escape, begun
        self._out = "{"

    def push(self, char: str) -> str:
        """One more character; what it adds to the object."""
        top, is_open = self._open[-1], char in _CONTAINERS
        if self._quote:
            self._in_string(char)
        elif self._nesting or (is_open and (self._word or self._next == "key")):
            self._nesting += is_open - (char in ")]}")
            self._word += char
        elif char in ("'", '"') and not self._word and self._next in ("key", "value"):
            self._begin_member()
            self._quote = char
            self._out += '"'
        elif is_open and self._next == "value":
            self._begin_member()
            self._open.append(_Open(*_CONTAINERS[char]))
            self._out += "[" if self._open[-1].closing == "]" else "{"
            self._next = "key" if char == "{" else "value"
        elif char == top.key_end and self._next in ("key", "key's end"):
            self._end_key()
        elif char in ",)]}":
            self._end_member()
            self._next = "key" if top.key_end else "value"
            if char != ",":
                self._close()
        elif self._next in ("key", "value") and (self._word or not char.isspace()):
            self._word += char
        out, self._out = self._out, ""
        return out

    def _in_string(self, char: str) -> None:
        if self._escape == "\\" and char in _ESCAPES:
            self._out += _ESCAPES[char]
            self._escape = ""
        elif self._escape == "\\" or (self._escape and char in hexdigits):
            self._escape += char
            self._end_escape()
        elif self._escape:
            self._out += _inside(self._escape)
            self._escape = ""
            self._in_string(char)
        elif char == "\\":
            self._escape = char
        elif char != self._quote:
            self._out += _inside(char)
        else:
            self._quote = ""
            self._out += '"'
            self._next = "key's end" if self._next == "key" else "end"

    def _end_escape(self) -> None:
        """What is no escape here, and rare in Python, stays as it is spelled."""
        lacking = _DIGITS.get(self._escape[1], 0) - len(self._escape[2:])
        if lacking <= 0:
            digits = self._escape[2:]
            self._out += f"\\u{digits:0>4}" if digits else _inside(self._escape)
            self._escape = ""

    def _begin_member(self) -> None:
        """A comma that no member follows is none."""
        top = self._open[-1]
        if self._next == "key" or not top.key_end:
            self._out += ", " if top.num_members else ""
            top.num_members += 1

    def _end_key(self) -> None:
        if self._next == "key":
            self._begin_member()
            self._out += _quoted(self._word.strip())
        self._word, self._next = "", "value"
        self._out += ": "

    def _end_member(self) -> None:
        """What was read of it may be bare, or a key without a value."""
        word = self._word.strip()
        if self._next == "key's end" or (self._next == "key" and word):
            self._end_key()
            self._out += "null"
        elif self._next == "value" and word:
            self._begin_member()
            self._out += _WORDS.get(word, word if _SAME.fullmatch(word) else _quoted(word))
        elif self._next == "value" and self._open[-1].key_end:
            self._out += "null"
        self._word = ""

    def _close(self) -> None:
        self._out += self._open.pop().closing
        self._next, self.done = "end", not self._open


def literal(text: str) -> str | None:
    """A list, tuple or dict as JSON; None where it is none."""
    keywords, out = Keywords(), ""
    for char in f"value={text})":
        if keywords.done:
            return None
        out += keywords.push(char)
    return out.removeprefix('{"value": ').removesuffix("}") if keywords.done else None


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _inside(text: str) -> str:
    return _quoted(text)[1:-1]
