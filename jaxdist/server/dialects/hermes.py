"""Hermes' dialect, and Qwen's: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

It is also what models learn that have none of their own.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.call_object import CallObject, schema_of_calls
from jaxdist.server.dialects.dialect import Dialect, Found, Until

BEGIN, END = "<tool_call>", "</tool_call>"


class Hermes(Dialect):
    """Each call stands between marks; the last one's end mark may be missing."""

    MARKS = (BEGIN,)

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._state = self._in_text
        self._text = Until(BEGIN)
        self._held = ""  # a mark and what follows it, up to an object or an end mark
        self._call: CallObject | None = None

    def read(self, char: str) -> None:
        self._state(char)

    def finish(self) -> None:
        if self._call is not None:
            self._call.finish()
        elif self._state == self._in_text:
            self._leave(self._text.take())
        elif self._state == self._before_object:
            self._leave(self._held)

    def _in_text(self, char: str) -> None:
        self._found.content(self._text.push(char))
        if self._text.complete:
            self._held, self._state = self._text.take(), self._before_object

    def _before_object(self, char: str) -> None:
        if char == "{":
            self._call = CallObject(self._found, self, self._held, strict=False)
            self._state = self._in_object
            self._in_object(char)
        elif char.isspace():
            self._held += char
        else:
            self._found.content(self._held)
            self._held, self._state = "", self._in_text
            self._in_text(char)

    def _in_object(self, char: str) -> None:
        assert self._call is not None
        was_call = self._call.push(char)
        if was_call is not None:
            self._call, self._held = None, ""
            self._state = self._before_end if was_call else self._in_text

    def _before_end(self, char: str) -> None:
        self._held += char
        waiting = self._held.lstrip()
        if END.startswith(waiting) and waiting != END:
            return
        rest = "" if waiting == END else self._held
        self._held, self._state = "", self._in_text
        for held in rest:
            self.read(held)

    @staticmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        return "\n".join(
            [
                f"start: TEXT | first object END {'(next object END)*' if several else ''}",
                f"first[lazy]: /(?s:.*){BEGIN}\\n/",
                f"next: /\\s*{BEGIN}\\n/",
                f'END: "\\n{END}"',
                f"object: %json {json.dumps(schema_of_calls(tools))}",
                f"TEXT: /(?s:.*)/ & ~/(?s:.*){BEGIN}(?s:.*)/",
            ]
        )
