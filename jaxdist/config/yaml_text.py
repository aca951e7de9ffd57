"""YAML in and out: strict about keys, and `1e-3` is a number."""

import re
from typing import Any

import yaml

from jaxdist.config.errors import UsageError

# libyaml is ten times faster than the pure Python reader.
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_BaseLoader):
    """YAML 1.1 reads `1e-3` as text and keeps the last of two equal keys; this one does neither."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise UsageError(
                    f"the key {key.value!r} stands twice (second time in line {key.start_mark.line + 1})"
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_yaml(text: str, where: str) -> dict[str, Any]:
    """The mapping that `text` holds; `where` names the text in errors."""
    try:
        values = yaml.load(text, _Loader)  # noqa: S506 (a subclass of the safe loader)
    except yaml.YAMLError as error:
        raise UsageError(f"{where} is not valid YAML: {error}") from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{where} must be a mapping of names to values")
    return values


def write_yaml(values: dict[str, Any]) -> str:
    """`values` as YAML, in the order they have."""
    return yaml.dump(values, sort_keys=False, allow_unicode=True, default_flow_style=False)
