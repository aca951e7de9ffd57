"""The dialect of ToolACE, and of Llama 3.2 and 4 where their template asks for it.

An answer is `[weather(city="Rome"), time()]`.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.dialect import Dialect, Found
from jaxdist.server.dialects.keywords import Keywords
from jaxdist.server.dialects.parameters import members

MARK = "[func_name1("  # as the templates show it
_CALL = re.compile(r"\s*([\w.-]{1,64})\s*\(\s*(?:\)|[\w.-]+\s*=)", re.ASCII)
_BEGIN_OF_CALL = re.compile(r"\s*[\w.-]{0,64}\s*(?:\(\s*(?:[\w.-]+\s*)?)?", re.ASCII)


class Pythonic(Dialect):
    """A list of calls of tools that exist; nothing else stands before it."""

    def __init__(self, found: Found, tools: Mapping[str, Any]):
        super().__init__(found, tools)
        self._state = self._before_list
        self._held = ""  # what may come to be a call
        self._keywords = Keywords()

    def read(self, char: str) -> None:
        self._state(char)

    def finish(self) -> None:
        if self._state != self._in_arguments:
            self._leave(self._held)

    def _before_list(self, char: str) -> None:
        self._held += char
        if char == "[":
            self._state = self._before_call
        elif not char.isspace():
            self._give_up()

    def _before_call(self, char: str) -> None:
        """After the bracket or a comma, which is held too."""
        self._held += char
        text = self._held.lstrip()[1:]
        call = _CALL.fullmatch(text)
        if call is not None and call[1] in self._tools:
            self._found.begin(call[1], self.new_id())
            self._held, self._state = "", self._in_arguments
            self._keywords = Keywords()
            for held in text.partition("(")[2]:
                self._in_arguments(held)
        elif _BEGIN_OF_CALL.fullmatch(text) is None:
            self._give_up()

    def _in_arguments(self, char: str) -> None:
        self._found.arguments(self._keywords.push(char))
        if self._keywords.done:
            self._state = self._after_call

    def _after_call(self, char: str) -> None:
        self._held += char
        if char == ",":
            self._state = self._before_call
        elif char == "]":
            self._held, self._state = "", self._after_list
        elif not char.isspace():
            self._give_up()

    def _after_list(self, char: str) -> None:
        self._held += char
        if not char.isspace():
            self._give_up()

    def _give_up(self) -> None:
        self._found.content(self._held)
        self._held, self._state = "", self._found.content

    @staticmethod
    def grammar(tools: Mapping[str, Any], several: bool) -> str:
        more = ' (", " call)*' if several else ""
        rules = [
            f'start: TEXT | "[" call{more} "]"',
            f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}",
            'any: NAME "=" %json {}',
            "NAME: /[A-Za-z_][0-9A-Za-z_]*/",
            "TEXT: /(?s:.*)/ & ~/\\s*\\[(?s:.*)/",
        ]
        for i, (name, held) in enumerate(tools.items()):
            if held is None:
                rules.append(f'call_{i}: {json.dumps(name + "(")} (any (", " any)*)? ")"')
            else:
                rules.append(f'call_{i}: {json.dumps(name + "(")} first_{i}_0 ")"')
                rules += _rules(i, name, held)
        return "\n".join(rules)


def _rules(i: int, name: str, held: Any) -> list[str]:
    """Of a tool's arguments from each one on: the first of all, or one that others precede."""
    rules, given = [], members(name, held)
    for j, member in enumerate(given):
        value = (
            f"{json.dumps(member.name + '=')} %json {json.dumps(member.schema)} more_{i}_{j + 1}"
        )
        skip = "" if member.required else " | "
        rules.append(f"first_{i}_{j}: {value}{skip and f'{skip}first_{i}_{j + 1}'}")
        rules.append(f'more_{i}_{j}: ", " {value}{skip and f"{skip}more_{i}_{j + 1}"}')
    return [*rules, f'first_{i}_{len(given)}: ""', f'more_{i}_{len(given)}: ""']
