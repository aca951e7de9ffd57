"""A call as a JSON object with its name and its arguments, read while it grows."""

import json
from collections.abc import Mapping
from typing import Any

from jaxdist.server.dialects.dialect import Dialect, Found

_ARGUMENTS = ("arguments", "parameters")
_KEYS = {"name", "type", "id", *_ARGUMENTS}


class Nesting:
    """How deep inside of objects and arrays a JSON text is.

    Attributes:
        depth: Objects and arrays that are open.
    """

    def __init__(self):
        self.depth = 0
        self._in_string = self._escaped = False

    def push(self, char: str) -> bool:
        """One more character; whether it stands outside of strings, as does a string's first."""
        if self._in_string:
            self._in_string = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
            return False
        self._in_string = char == '"'
        self.depth += (char in "{[") - (char in "}]")
        return True


class ObjectScanner:
    """Reads one JSON object from its first brace on.

    Attributes:
        name: Its member "name", once read.
        has_object: Whether its arguments have begun and are an object.
        strange: Whether there is a key that no call has.
        done: Whether its last brace was read.
    """

    def __init__(self):
        self.name: str | None = None
        self.has_object = self.strange = self.done = False
        self._nesting = Nesting()
        self._chars: list[str] = []
        self._part: list[str] = []  # the key or value being read
        self._key: object = None
        self._in_value = False
        self._arguments_key: object = None  # of two the first counts
        self._new_arguments: list[str] = []

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._chars)

    def push(self, char: str) -> None:
        """One more character; none may follow the last brace."""
        self._chars.append(char)
        outside, depth = self._nesting.push(char), self._nesting.depth
        if len(self._chars) == 1:
            return
        if outside and depth == 1 and char == ":" and not self._in_value:
            self._begin_value()
        elif outside and (depth == 0 or (depth == 1 and char == ",")):
            self._end_value()
            self.done = depth == 0
        else:
            self._keep(char, blank=outside and depth == 1 and char.isspace())

    def new_arguments(self) -> str:
        """More of the arguments' text."""
        piece = "".join(self._new_arguments)
        self._new_arguments.clear()
        return piece

    def _begin_value(self) -> None:
        self._key = _parsed(self._part)
        self.strange |= self._key not in _KEYS
        if self._arguments_key is None and self._key in _ARGUMENTS:
            self._arguments_key = self._key
        elif self._key in _ARGUMENTS:
            self._key = None
        self._part, self._in_value = [], True

    def _end_value(self) -> None:
        if self._in_value and self._key == "name":
            name = _parsed(self._part)
            self.name = name if isinstance(name, str) else None
        self._part, self._in_value = [], False

    def _keep(self, char: str, *, blank: bool) -> None:
        if self._in_value and self._key is not None and self._key == self._arguments_key:
            if not blank:
                self.has_object |= char == "{" and not self._part
                self._new_arguments.append(char)
        if not blank:
            self._part.append(char)


class CallObject:
    """Tells of a call as its object is read; of anything else as content."""

    def __init__(self, found: Found, dialect: Dialect, opening: str, *, strict: bool = True):
        """opening: What stood before it and is content too where this is no call.
        strict: Take it for a call only where its arguments are an object, and its keys a call's."""
        self._found, self._dialect = found, dialect
        self._opening, self._strict = opening, strict
        self._scanner, self._begun = ObjectScanner(), False

    def push(self, char: str) -> bool | None:
        """One more character, `{` being the first. Whether this was a call, once that is known."""
        scanner = self._scanner
        scanner.push(char)
        if not self._begun and scanner.name is not None:
            self._begun = not self._strict or (scanner.has_object and not scanner.strange)
            if self._begun:
                self._found.begin(scanner.name, self._dialect.new_id())
        if self._begun:
            self._found.arguments(scanner.new_arguments())
        elif scanner.done or (self._strict and scanner.strange):
            self.finish()
            return False
        return True if scanner.done else None

    def finish(self) -> None:
        """The end: what was no call is content."""
        if not self._begun:
            self._found.content(self._opening + self._scanner.text)


def schema_of_calls(tools: Mapping[str, Any], key: str = "arguments") -> dict[str, Any]:
    """The JSON schema of one call.

    tools: What each one's parameters are held to, by its name; None: to nothing. key: Theirs.
    """
    schemas = [
        _schema(name, {"type": "object"} if held is None else _resource(held, f"urn:tool:{i}"), key)
        for i, (name, held) in enumerate(tools.items())
    ]
    return {"anyOf": schemas}


def _resource(schema: dict[str, Any], id_: str) -> dict[str, Any]:
    """The schema as one of its own inside of another: its `#/$defs/...` are looked for in it.

    That is what `$id` does, which draft 7 does not read beside a `$ref`.
    """
    schema = schema | {"$id": id_}
    if "$ref" not in schema:
        return schema
    parts = schema.get("allOf", [])
    ref = [{"$ref": schema.pop("$ref")}]
    return schema | {"allOf": [*parts, *ref] if isinstance(parts, list) else parts}


def _schema(name: str, held: dict[str, Any], key: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, key: held},
        "required": ["name", key],
        "additionalProperties": False,
    }


def _parsed(chars: list[str]) -> object:
    try:
        return json.loads("".join(chars))
    except ValueError:
        return None
