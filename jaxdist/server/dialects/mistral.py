"""Mistral's dialect: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`.

Since Mistral Small 3.2 each call is `[TOOL_CALLS]name[ARGS]{...}`, with `[CALL_ID]id` before
`[ARGS]` in some.
"""

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.call_object import CallObject, Nesting, schema_of_calls
from jaxdist.server.dialects.dialect import Dialect, Found, Until

MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAMED = re.compile(
    rf"\s*([\w.-]{{1,64}})\s*(?:{re.escape(_ID)}\s*[\w-]*\s*)?(?:{re.escape(_ARGUMENTS)}\s*)?",
    re.ASCII,
)
_OF_NAMED = re.compile(r"[\w.\-\[\]\s]", re.ASCII)
_MOST = 200  # characters from the mark to the arguments of a named call


class Mistral(Dialect):
    """After the mark stands an array of calls, or a name and its arguments."""

    MARKS = (MARK, _ID, _ARGUMENTS)

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._state = self._in_text
        self._text = Until(MARK)
        self._mark = self._held = ""  # the mark, and what follows it up to a call
        self._expected = "["  # before an array's next call
        self._call: CallObject | None = None
        self._nesting = Nesting()

    @staticmethod
    def new_id() -> str:
        return secrets.token_hex(5)[:9]  # Mistral's templates refuse any other length

    def read(self, char: str) -> None:
        self._state(char)

    def finish(self) -> None:
        if self._call is not None:
            self._call.finish()
        elif self._state != self._in_array or self._expected == "[":
            self._leave(self._text.take() + self._mark + self._held)

    def _in_text(self, char: str) -> None:
        self._found.content(self._text.push(char))
        if self._text.complete:
            self._mark, self._state = self._text.take(), self._after_mark

    def _after_mark(self, char: str) -> None:
        if char == "[" and not self._held.strip():
            self._held += char
            self._expected, self._state = "[", self._in_array
        elif char == "{" and (named := _NAMED.fullmatch(self._held)):
            self._found.begin(named[1], self.new_id())
            self._mark = self._held = ""
            self._nesting, self._state = Nesting(), self._in_arguments
            self._in_arguments(char)
        elif _OF_NAMED.match(char) and len(self._held) < _MOST:
            self._held += char
        else:
            self._give_up(char)

    def _in_arguments(self, char: str) -> None:
        self._found.arguments(char)
        self._nesting.push(char)
        if not self._nesting.depth:
            self._state = self._in_text

    def _in_array(self, char: str) -> None:
        between = self._held.strip()
        if char == "{" and between == self._expected:
            self._call = CallObject(self._found, self, self._mark + self._held)
            self._mark = self._held = ""
            self._state = self._in_object
            self._in_object(char)
        elif char == "]" and self._expected == "," and not between:
            self._held, self._state = "", self._in_text
        elif char.isspace() or (char == "," == self._expected and not between):
            self._held += char
        else:
            self._give_up(char)

    def _in_object(self, char: str) -> None:
        assert self._call is not None
        was_call = self._call.push(char)
        if was_call is not None:
            self._call, self._expected = None, ","
            self._state = self._in_array if was_call else self._in_text

    def _give_up(self, char: str) -> None:
        """The mark was none, but what follows may hold another."""
        rest = self._held + char
        self._found.content(self._mark)
        self._mark = self._held = ""
        self._state = self._in_text
        for held in rest:
            self.read(held)

    @staticmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        most = {} if several else {"maxItems": 1}
        calls = {"type": "array", "minItems": 1, "items": schema_of_calls(tools), **most}
        mark = re.escape(MARK)
        return "\n".join(
            [
                "start: TEXT | first array",
                f"first[lazy]: /(?s:.*){mark}/",
                f"array: %json {json.dumps(calls)}",
                f"TEXT: /(?s:.*)/ & ~/(?s:.*){mark}(?s:.*)/",
            ]
        )
