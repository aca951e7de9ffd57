"""Dialects in which each call stands between `<tool_call>` and `</tool_call>`."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.server.dialects.dialect import Dialect, Found

BEGIN, END = "<tool_call>", "</tool_call>"


class BetweenMarks(Dialect):
    """Where it stands in an answer is the method that takes the next character."""

    MARKS = (BEGIN,)

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._state: Callable[[str], None] = self._in_text
        self._held = ""  # a mark and what follows it, as long as it may be no call

    def read(self, char: str) -> None:
        self._state(char)

    @abstractmethod
    def _in_text(self, char: str) -> None:
        """Outside of calls."""

    def _before_end(self, char: str) -> None:
        """After a call: its end mark may be missing."""
        self._held += char
        waiting = self._held.lstrip()
        if waiting == END:
            self._read_on("")
        elif not END.startswith(waiting):
            self._read_on(self._held)

    def _read_on(self, text: str) -> None:
        """`text` stands outside of calls, and may hold a mark."""
        self._held, self._state = "", self._in_text
        for char in text:
            self.read(char)


def grammar_between_marks(several: bool, *rules: str) -> str:
    """Of free text that may end with calls; `rules` say what a `call` is, from mark to mark."""
    return "\n".join(
        [
            f"start: TEXT | first call END {'(next call END)*' if several else ''}",
            f"first[lazy]: /(?s:.*){BEGIN}\\n/",
            f"next: /\\s*{BEGIN}\\n/",
            f'END: "\\n{END}"',
            f"TEXT: /(?s:.*)/ & ~/(?s:.*){BEGIN}(?s:.*)/",
            *rules,
        ]
    )
