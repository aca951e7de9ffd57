"""Checks of a single field, called from the `__post_init__` of the sections.

Each takes the field's dotted name as the user writes it (`train.steps`) and raises `UsageError`
with the rule, the value and the fix.
"""

import struct
from collections.abc import Sequence
from typing import Any

from jaxdist.config.errors import UsageError, did_you_mean

_LARGEST_WHOLE = 2**31 - 1  # of an int32, in which devices count
_LARGEST_NUMBER = 3.4e38  # of a float32
_LEAST_NORMAL = 2.0**-126  # of a float32


def whole(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    """`value` is an int within [minimum, maximum]; without a maximum an int32."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name}={value!r} must be a whole number (int)")
    if maximum is None and value > _LARGEST_WHOLE:
        maximum = _LARGEST_WHOLE
    if value < minimum or (maximum is not None and value > maximum):
        raise UsageError(f"{name}={value} must be {_range(minimum, maximum)}")


def number(
    name: str,
    value: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    above: float | None = None,
    below: float | None = None,
) -> None:
    """`value` is finite, within [minimum, maximum], greater than `above`, less than `below`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name}={value!r} must be a number (float)")
    if not abs(value) <= _LARGEST_NUMBER:
        raise UsageError(f"{name}={value} must be a finite number (float of 32 bits)")
    too_low = (minimum is not None and value < minimum) or (above is not None and value <= above)
    too_high = (maximum is not None and value > maximum) or (below is not None and value >= below)
    if too_low or too_high:
        raise UsageError(f"{name}={value} must be {_range(minimum, maximum, above, below)}")
    # A value that only rounding takes to its bound would divide by zero on the device.
    if _on_device(value) in (above, below):
        raise UsageError(
            f"{name}={value} must be {_range(minimum, maximum, above, below)}; as a float of 32 "
            f"bits it is {_on_device(value):g}"
        )


def _on_device(value: float) -> float:
    """As a float of 32 bits; what is nearer to zero than the normal ones devices take for zero."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return rounded if abs(rounded) >= _LEAST_NORMAL else 0.0


def flag(name: str, value: Any) -> None:
    """`value` is true or false."""
    if not isinstance(value, bool):
        raise UsageError(f"{name}={value!r} must be true or false")


def text(name: str, value: Any) -> None:
    """`value` is a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise UsageError(f"{name}={value!r} must be a text that is not empty")


def path(name: str, value: Any) -> None:
    """`value` is a text that may name a file, and that files can hold: YAML, JSON, checkpoints."""
    text(name, value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name}={value!r} is not UTF-8; rename the file or folder") from None
    if "\0" in value:
        raise UsageError(f"{name}={value!r} holds a zero byte, which no file's name has")


def choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """`value` is one of `choices`."""
    if isinstance(value, bool) or value not in choices:
        listed = ", ".join(map(str, choices))
        hint = (
            did_you_mean(value, [c for c in choices if isinstance(c, str)])
            if isinstance(value, str)
            else ""
        )
        raise UsageError(f"{name}={value!r} is not one of {listed}{hint}")


def _range(
    minimum: float | None,
    maximum: float | None,
    above: float | None = None,
    below: float | None = None,
) -> str:
    parts = [
        f"{words} {bound}"
        for words, bound in (
            ("at least", minimum),
            ("greater than", above),
            ("at most", maximum),
            ("less than", below),
        )
        if bound is not None
    ]
    return " and ".join(parts)
