"""A tool's parameters one by one, for dialects that write them so."""

from dataclasses import dataclass
from typing import Any

from jaxdist.config import UsageError

_ELSEWHERE = ("$ref", "anyOf", "oneOf", "allOf", "patternProperties", "if", "not")


@dataclass(frozen=True)
class Member:
    """One parameter; `schema` stands for itself."""

    name: str
    schema: Any
    required: bool


def members(tool: str, schema: Any) -> list[Member]:
    """In the schema's order. UsageError where it does not tell them one by one."""
    if found := [key for key in _ELSEWHERE if key in schema]:
        raise UsageError(
            f"tools: a strict tool's parameters, here those of {tool}, must be plain properties; "
            f"they have {found[0]}"
        )
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        raise UsageError(f"tools: the parameters of {tool} are no JSON schema")
    for name, given in properties.items():
        if isinstance(given, dict) and not isinstance(given.get("enum", []), list):
            raise UsageError(
                f"tools: the parameters of {tool} are no JSON schema: enum of {name} must be a list"
            )
    return [
        Member(name, given | shared if isinstance(given, dict) else given, name in required)
        for name, given in properties.items()
    ]


def kind_of(schema: Any) -> tuple[str, bool]:
    """(the JSON type of a value, whether it may be null); "string" where nothing tells.

    As vLLM has it: of several types the first but null counts.
    """
    kinds = _kinds(schema)
    return next((kind for kind in kinds if kind != "null"), "string"), "null" in kinds


def _kinds(schema: Any) -> list[str]:
    """Whatever a client has sent for a schema."""
    if not isinstance(schema, dict):
        return []
    kind = schema.get("type")
    if isinstance(kind, str):
        return [kind]
    if isinstance(kind, list):
        return [one for one in kind if isinstance(one, str)]
    for key in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(key), list):
            return [kind for option in options for kind in _kinds(option)]
    if isinstance(values := schema.get("enum"), list):
        return ["string" if any(isinstance(value, str) for value in values) else "number"]
    return ["object"] if "$ref" in schema else []
