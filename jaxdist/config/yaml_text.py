"""YAML in and out: strict about keys, and `1e-3` is a number."""

import re
from typing import Any

import yaml

from jaxdist.config.errors import UsageError

# libyaml is ten times faster than the pure Python reader.
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

# The core schema of YAML 1.2. By YAML 1.1, which is PyYAML's, `1e-3` is text, `10:12` is 612 and
# `no` is false.
_SCALARS = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
}


class _Loader(_BaseLoader):
    """The safe loader, which also refuses a key that stands twice (PyYAML keeps the last)."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in seen:
                raise UsageError(f"the key {name!r} stands twice, again in line {line}")
            seen.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would read as something else than text."""


for _tag, (_pattern, _first) in _SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first
        )


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping that `text` holds; `where` names the text in errors."""
    try:
        values = yaml.load(text, _Loader)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of thousands of digits
        raise UsageError(f"{where} is not valid YAML: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{where} must be a mapping of names to values")
    return values


def write_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML, in the order they have."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
