"""Qwen3-Coder's dialect: a call's arguments one by one, between marks like those of XML.

    <tool_call>
    <function=weather>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

A text stands there as it is, anything else as JSON: which of both, the tool's schema says.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.bare_text import bare_text
from jaxdist.server.dialects.bare_value import BareValue
from jaxdist.server.dialects.between_marks import (
    BEGIN,
    END,
    BetweenMarks,
    grammar_between_marks,
)
from jaxdist.server.dialects.dialect import Found, Until
from jaxdist.server.dialects.parameters import Member, kind_of, members

FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"\s*([\w.-]{1,64})\s*", re.ASCII)
_VALUE_END = f"\n{_PARAMETER_END}\n"
_MOST = 200  # characters of a name and of what stands around it


class Qwen3Coder(BetweenMarks):
    """Models at times leave out the outer marks."""

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._text = Until(BEGIN, FUNCTION)
        self._schemas: dict[str, Any] = {}  # of the call's parameters
        self._num_members = 0
        self._value = BareValue({}, _PARAMETER_END)

    def finish(self) -> None:
        if self._state in (self._in_text, self._before_function, self._in_name):
            self._leave(self._held + self._text.take())

    def _in_text(self, char: str) -> None:
        self._found.content(self._text.push(char))
        if self._text.complete:
            self._held = self._text.take()
            named = self._held.endswith(FUNCTION)
            self._state = self._in_name if named else self._before_function

    def _before_function(self, char: str) -> None:
        self._held += char
        after = self._held.partition(BEGIN)[2].lstrip()
        if after == FUNCTION:
            self._state = self._in_name
        elif not FUNCTION.startswith(after):
            self._give_up(BEGIN)

    def _in_name(self, char: str) -> None:
        self._held += char
        name = self._held.partition(FUNCTION)[2]
        if char == ">" and (named := _NAME.fullmatch(name[:-1])):
            self._begin(named[1])
        elif char in "<>" or len(name) > _MOST:
            self._give_up(FUNCTION)

    def _begin(self, name: str) -> None:
        schemas = (self._tools.get(name) or {}).get("properties")
        self._schemas = schemas if isinstance(schemas, dict) else {}
        self._found.begin(name, self.new_id())
        self._held, self._num_members, self._state = "", 0, self._in_function

    def _in_function(self, char: str) -> None:
        """Between parameters; what else stands there is nothing."""
        self._held = self._held + char if self._held or char == "<" else ""
        if self._held == _PARAMETER:
            self._held, self._state = "", self._in_key
        elif self._held in (_FUNCTION_END, END):
            self._found.arguments("}" if self._num_members else "{}")
            self._state = self._before_end if self._held == _FUNCTION_END else self._in_text
            self._held = ""
        elif not any(mark.startswith(self._held) for mark in (_PARAMETER, _FUNCTION_END, END)):
            self._held = char if char == "<" else ""

    def _in_key(self, char: str) -> None:
        if char == ">":
            key = self._held.strip()
            self._value = BareValue(self._schemas.get(key), _PARAMETER_END)
            before = ", " if self._num_members else "{"
            self._found.arguments(
                f"{before}{json.dumps(key, ensure_ascii=False)}: {self._value.opening}"
            )
            self._num_members += 1
            self._held, self._state = "", self._in_value
        else:
            self._held += char

    def _in_value(self, char: str) -> None:
        self._found.arguments(self._value.push(char))
        if self._value.done:
            self._state = self._in_function

    def _give_up(self, mark: str) -> None:
        """The mark was none, but what follows it may hold another."""
        before, mark, rest = self._held.partition(mark)
        self._found.content(before + mark)
        self._read_on(rest)

    @staticmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        rules = [
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            f"any: /{_PARAMETER}[^<>\\n]+>\\n/ text",
            f"VALUE_END: {json.dumps(_VALUE_END)}",
            "text[lazy]: /(?s:.*)\\n<\\/parameter>\\n/",
        ]
        for i, (name, held) in enumerate(tools.items()):
            given = [] if held is None else members(name, held)
            wanted = ["any*"] if held is None else []
            for j, member in enumerate(given):
                wanted.append(f"arg_{i}_{j}{'' if member.required else '?'}")
                rules.append(_rule(i, j, member))
            begin, end = json.dumps(f"{FUNCTION}{name}>\n"), json.dumps(_FUNCTION_END)
            rules.append(f"call_{i}: {begin} {' '.join(wanted)} {end}")
        return grammar_between_marks(several, *rules)


def _rule(i: int, j: int, member: Member) -> str:
    """Of one parameter in a grammar."""
    name, begin = f"arg_{i}_{j}", json.dumps(f"{_PARAMETER}{member.name}>\n")
    schema = member.schema if isinstance(member.schema, dict) else {}
    if kind_of(schema)[0] != "string":
        return f"{name}: {begin} %json {json.dumps(member.schema)} VALUE_END"
    text = bare_text(schema, _VALUE_END)
    return f"{name}: {begin} TEXT_{i}_{j}\nTEXT_{i}_{j}: {text}"
