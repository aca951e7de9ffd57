"""A text that stands between marks as it is, held to its JSON schema by a terminal of Lark."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.config import UsageError

_ANY = "(?s:.*)"
_PART = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # of a regular expression


def bare_text(schema: Mapping[str, Any], end: str) -> str:
    """A terminal's expression: a text of this schema, and `end`, whose mark it does not hold.

    Kept to are enum, const, pattern, minLength and maxLength; `format` is a note, as JSON Schema
    has it. UsageError where one of them is no such thing.
    """
    mark = re.escape(end.strip()).replace("/", "\\/")
    return f"({' & '.join(_terms(schema))} & ~/{_ANY}{mark}{_ANY}/) {json.dumps(end)}"


def _terms(schema: Mapping[str, Any]) -> Iterator[str]:
    values = [schema["const"]] if "const" in schema else schema.get("enum", [])
    texts = [json.dumps(value, ensure_ascii=False) for value in values if isinstance(value, str)]
    yield f"({' | '.join(texts)})" if texts else f"/{_ANY}/"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    for name, length in (("minLength", least), ("maxLength", most or 0)):
        if not isinstance(length, int) or isinstance(length, bool) or length < 0:
            raise UsageError(f"tools: {name} of a text must be a whole number from 0 up")
    if (least, most) != (0, ""):
        yield f"/(?s:.{{{least},{most}}})/"
    if "pattern" in schema:
        if not isinstance(schema["pattern"], str):
            raise UsageError("tools: pattern of a text must be a text")
        yield f"/{_anywhere(schema['pattern'])}/"


def _anywhere(pattern: str) -> str:
    """Matches a whole text where the pattern is found in it.

    Expressions of Lark match wholes. Anchors that do not begin or end a branch it refuses itself.
    """
    branches: list[list[str]] = [[]]
    depth = 0
    for part in _PART.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and not depth:
            branches.append([])
        else:
            branches[-1].append(part)
    found = []
    for parts in branches:
        before = after = _ANY
        if parts[:1] == ["^"]:
            before, parts = "", parts[1:]
        if parts[-1:] == ["$"]:
            after, parts = "", parts[:-1]
        found.append(f"{before}(?:{''.join(parts)}){after}")
    return re.sub(r"\\.|[/\n]", _escaped, "|".join(found), flags=re.DOTALL)


def _escaped(part: re.Match[str]) -> str:
    """What would end an expression of Lark."""
    return {"/": r"\/", "\n": r"\n"}.get(part[0], part[0])
