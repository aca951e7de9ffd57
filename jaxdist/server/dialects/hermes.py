"""Hermes' dialect, and Qwen's: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

It is also what models learn that have none of their own.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.between_marks import BEGIN, BetweenMarks, grammar_between_marks
from jaxdist.server.dialects.call_object import CallObject, schema_of_calls
from jaxdist.server.dialects.dialect import Found, Until


class Hermes(BetweenMarks):
    """The last call's end mark may be missing."""

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._text = Until(BEGIN)
        self._call: CallObject | None = None

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
            self._read_on(char)

    def _in_object(self, char: str) -> None:
        assert self._call is not None
        was_call = self._call.push(char)
        if was_call is not None:
            self._call, self._held = None, ""
            self._state = self._before_end if was_call else self._in_text

    @staticmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        call = f"call: %json {json.dumps(schema_of_calls(tools))}"
        return grammar_between_marks(several, call)
