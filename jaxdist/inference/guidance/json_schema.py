"""A client's JSON schema as the text that llguidance takes."""

import json
from math import floor
from typing import Any

from jaxdist.config import UsageError

_NUDGE = 1e-9
_VALUES = ("const", "enum", "default", "examples")  # hold values, not schemas


def schema_text(schema: object) -> str:
    """Raises UsageError where it is not JSON, too deep, or no schema."""
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(value, bool):  # llguidance knows these within a schema only
            value = {} if value else {"not": {}}
        text = json.dumps(_nudged(value), ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise UsageError("the JSON schema is too deep; nest it less") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"the JSON schema is not JSON ({str(error):.100})") from None
    if not isinstance(value, dict):
        raise UsageError('the JSON schema is not an object; give one such as {"type": "object"}')
    return text


def _nudged(schema: Any) -> Any:
    """With exclusive bounds moved inward a little where llguidance would let them be reached.

    It does for a whole bound whose interval ends before the next whole number: above 0, at most
    0.25.
    """
    if isinstance(schema, list):
        return [_nudged(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {k: v if k in _VALUES else _nudged(v) for k, v in schema.items()}
    low, high = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    least, most = schema.get("minimum", low), schema.get("maximum", high)
    if _is_number(least) and _is_number(most) and floor(most) <= floor(least) + 1:
        if _is_number(low):
            schema["exclusiveMinimum"] = low + _NUDGE
        if _is_number(high):
            schema["exclusiveMaximum"] = high - _NUDGE
    return schema


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e6
