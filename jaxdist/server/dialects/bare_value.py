"""A value that stands between marks as it is, a text without quotes, as JSON."""

import json
from typing import Any

from jaxdist.server.dialects.keywords import literal
from jaxdist.server.dialects.parameters import kind_of

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


class BareValue:
    """Reads one value up to its end mark. A line's end after the begin and before the end is none
    of it.

    Attributes:
        opening: How it begins, as JSON.
        done: Whether the mark was read.
    """

    def __init__(self, schema: Any, end: str):
        self._ends = (end, f"\n{end}")
        self._kind, self._nullable = kind_of(schema)
        self._is_told = self._kind == "string" and not self._nullable  # as it comes
        self.opening, self.done = '"' if self._is_told else "", False
        self._begun, self._held, self._text = False, "", ""

    def push(self, char: str) -> str:
        """What one more character adds, as JSON."""
        begun, self._begun = self._begun, True
        if char == "\n" and not begun:
            return ""
        self._held += char
        if self._held in self._ends:
            self.done = True
            return '"' if self._is_told else _as_json(self._text, self._kind, self._nullable)
        held = self._held
        keep = next(
            i for i in range(len(held) + 1) if any(e.startswith(held[i:]) for e in self._ends)
        )
        self._held = held[keep:]
        if self._is_told:
            return _quoted(held[:keep])[1:-1]
        self._text += held[:keep]
        return ""


def _as_json(text: str, kind: str, nullable: bool) -> str:
    """A value that is no text, or may be null; a text where it turns out to be one."""
    word = text.strip().lower()
    if kind == "string":
        return "null" if word in ("null", "none") else _quoted(text)
    if word in _WORDS:
        return _WORDS[word]
    try:
        json.loads(text, parse_constant=_refuse)
        return text.strip()
    except (ValueError, RecursionError):
        return (literal(text.strip()) if word[:1] in ("[", "{", "(") else None) or _quoted(text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
