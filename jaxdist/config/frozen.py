"""A dict that cannot change, so that the dataclasses holding it stay hashable."""

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn


class FrozenDict(dict):
    """A read-only, hashable dict; lists inside become tuples."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]):
        super().__init__({key: frozen(value) for key, value in dict(values).items()})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a config is frozen; vary it with dataclasses.replace")

    __setitem__ = __delitem__ = __ior__ = _refuse  # type: ignore[assignment]
    update = pop = popitem = clear = setdefault = _refuse  # type: ignore[assignment]

    def __reduce__(self):
        return FrozenDict, (dict(self),)


def frozen(value: Any) -> Any:
    """`value` with its dicts and lists made immutable."""
    if isinstance(value, Mapping):
        return FrozenDict(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    return value


def thawed(value: Any) -> Any:
    """The opposite of `frozen`: plain dicts and lists, as YAML and JSON want them."""
    if isinstance(value, Mapping):
        return {key: thawed(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(thawed, value))
    return value
