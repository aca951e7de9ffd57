"""Published model shapes by name, each a small YAML beside this file."""

from functools import cache
from importlib import resources
from typing import Any

from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.yaml_text import read_yaml


@cache
def preset_names() -> tuple[str, ...]:
    """Names of all presets, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(
        sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))
    )


def check_preset(name: Any) -> None:
    """Refuse a name that is no preset's, naming the nearest."""
    if name not in preset_names():
        hint = did_you_mean(name, preset_names()) if isinstance(name, str) else ""
        raise UsageError(f"model.preset={name!r} is not one of {', '.join(preset_names())}{hint}")


def load_preset(name: str) -> dict[str, Any]:
    """Fields of the preset `name`, as `ModelConfig` takes them."""
    check_preset(name)
    text = resources.files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return read_yaml(text, f"preset {name}")
