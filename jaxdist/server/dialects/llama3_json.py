"""Llama's dialect since 3.1: an answer that is `{"name": ..., "parameters": {...}}`.

A mark may stand before it. Several calls are separated by `;` or white space.
"""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.call_object import CallObject, schema_of_calls
from jaxdist.server.dialects.dialect import Dialect, Found, Until

MARK = "<|python_tag|>"
_SPACE = " \t\r\n"


class Llama3Json(Dialect):
    """A call stands at the answer's begin, after a call or after the mark: elsewhere an object is
    part of a text."""

    MARKS = (MARK,)

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._text: Until | None = None  # None where a call may begin
        self._lead = ""  # what stands before a call that may begin
        self._call: CallObject | None = None

    def read(self, char: str) -> None:
        if self._call is not None:
            was_call = self._call.push(char)
            if was_call is not None:
                self._call, self._text = None, None if was_call else Until(MARK)
        elif self._text is not None:
            self._found.content(self._text.push(char))
            if self._text.complete:
                self._lead, self._text = self._text.take(), None
        else:
            self._before_call(char)

    def finish(self) -> None:
        if self._call is not None:
            self._call.finish()
        elif self._text is not None:
            self._leave(self._text.take())
        elif self._lead.strip(self._gap) or not self._found.num_calls:
            self._found.content(self._lead)

    @property
    def _gap(self) -> str:
        return _SPACE + ";" if self._found.num_calls else _SPACE

    def _before_call(self, char: str) -> None:
        before = self._lead.lstrip(self._gap)
        if char == "{" and (not before or before.startswith(MARK)):
            self._call, self._lead = CallObject(self._found, self, self._lead), ""
            self._call.push(char)
            return
        self._lead += char
        before = self._lead.lstrip(self._gap)
        if MARK.startswith(before) or before.strip(_SPACE) == MARK:
            return
        head, mark, rest = self._lead.partition(MARK)
        if not mark:
            head, rest = "", head
        self._found.content(head + mark)
        self._lead, self._text = "", Until(MARK)
        for held in rest:
            self.read(held)

    @staticmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        mark = MARK.replace("|", "\\|")
        return "\n".join(
            [
                f"start: TEXT | object {'(SEPARATOR object)*' if several else ''}",
                'SEPARATOR: "; "',
                f"object: %json {json.dumps(schema_of_calls(tools, 'parameters'))}",
                f"TEXT: /(?s:.*)/ & ~/\\s*\\{{(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/",
            ]
        )
