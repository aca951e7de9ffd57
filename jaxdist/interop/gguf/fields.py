"""Typed reading of a GGUF file's metadata: a wrong type is an error that names file and key."""

from dataclasses import dataclass
from reprlib import repr as brief
from typing import Any, NoReturn

import numpy as np

from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.header import GGUFHeader

REQUIRED: Any = object()


def shortest(value: float) -> float:
    """The shortest decimal that is `value` in fp32, as which files hold it: 1e-05, not 9.99e-06."""
    with np.errstate(over="ignore"):
        return float(str(np.float32(value)))


@dataclass(frozen=True)
class Fields:
    """The keys of one architecture; `key` is written without its prefix."""

    header: GGUFHeader
    prefix: str  # `llama.`

    def whole(self, key: str, default: Any = REQUIRED) -> int:
        """A whole number, or an array with the same one for every layer."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        elif isinstance(value, np.ndarray):
            self.fail(key, "differs from layer to layer, which no model here can express")
        if value is not default and (isinstance(value, bool) or not isinstance(value, int)):
            self.fail(key, f"{brief(value)} is not a whole number")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A number. Those of 32 bits become the shortest decimal that gives the same bits."""
        value = self._value(key, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(key, f"{brief(value)} is not a number")
        return shortest(value)

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        """A truth value."""
        value = self._value(key, default)
        if value is not default and not isinstance(value, bool):
            self.fail(key, f"{brief(value)} is not true or false")
        return value

    def text(self, key: str, default: Any = REQUIRED) -> str:
        """A string."""
        value = self._value(key, default)
        if value is not default and not isinstance(value, str):
            self.fail(key, f"{brief(value)} is not a string")
        return value

    def fail(self, key: str, rule: str) -> NoReturn:
        raise UsageError(f"{self.header.path}: {self.prefix}{key}: {rule}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.header.metadata.get(self.prefix + key, default)
        if value is REQUIRED:
            self.fail(key, "is missing")
        return value
