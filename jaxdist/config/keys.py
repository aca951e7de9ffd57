"""The keys of a run's config, read off its dataclasses: names, types and what they mean."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import docstring_parser

from jaxdist.config.run import RunConfig

# type -> (in an error, in the help)
_KINDS = {
    int: ("a whole number (int)", "N"),
    float: ("a finite number (float)", "X"),
    bool: ("true or false", "BOOL"),
    str: ("text", "TEXT"),
}
_OTHER_KIND = ("a mapping", "MAPPING")


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key that a user may set.

    Attributes:
        section: Name of its section, or empty for an everyday flag.
        name: Name of the dataclass field.
        hint: Its type.
        meaning: From the docstring of its dataclass.
        default: Its default in words; empty where it is required or depends on others.
    """

    section: str
    name: str
    hint: Any
    meaning: str
    default: str

    @property
    def path(self) -> str:
        """`train.steps`, or `mesh` where there is no section."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def option(self) -> str:
        """`--train.steps`, `--output-dir`."""
        return f"--{self.path}" if self.section else f"--{self.name.replace('_', '-')}"

    @property
    def is_flag(self) -> bool:
        """Whether the bare option means true."""
        return bool in (self.hint, *get_args(self.hint))

    @property
    def is_list(self) -> bool:
        """Whether the option takes one or more values: paths, or mappings of path and options."""
        return get_origin(self.hint) is Sequence

    @property
    def kind(self) -> str:
        """The type in words: `a whole number (int) or null`."""
        if self.is_list:
            return "paths, or mappings of path and options"
        words = [_KINDS.get(hint, _OTHER_KIND)[0] for hint in self._hints if hint is not NoneType]
        return " or ".join(words + (["null"] if NoneType in self._hints else []))

    @property
    def placeholder(self) -> str:
        """The value's stand-in in the help: N, X, TEXT."""
        return "SOURCE" if self.is_list else _KINDS.get(self._hints[0], _OTHER_KIND)[1]

    @property
    def _hints(self) -> tuple[Any, ...]:
        """The members of a union, or the type alone."""
        return get_args(self.hint) if NoneType in get_args(self.hint) else (self.hint,)


@cache
def sections() -> dict[str, type]:
    """The sections by name, in the order of `RunConfig`: model, parallel, ..."""
    hints = get_type_hints(RunConfig)
    return {f.name: hints[f.name] for f in fields(RunConfig) if is_dataclass(hints[f.name])}


@cache
def keys() -> dict[str, Key]:
    """All keys by their dotted path."""
    everyday = [key for key in _keys_of("", RunConfig) if key.name not in sections()]
    grouped = [key for name, kind in sections().items() for key in _keys_of(name, kind)]
    return {key.path: key for key in everyday + grouped}


def _keys_of(section: str, kind: type) -> list[Key]:
    params = docstring_parser.parse(kind.__doc__ or "").params
    meanings = {param.arg_name: " ".join((param.description or "").split()) for param in params}
    hints = get_type_hints(kind)
    return [
        Key(
            section=section,
            name=f.name,
            hint=hints[f.name],
            meaning=meanings.get(f.name, ""),
            default=_in_words(f.default),
        )
        for f in fields(kind)
    ]


def _in_words(default: Any) -> str:
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return "" if default is MISSING else str(default)
