"""From layers of values (preset, YAML files, command line) to one config, and back to YAML.

A layer is a nested dict of what one place sets; a later layer wins over an earlier one.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

from jaxdist.config import limits
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.frozen import thawed
from jaxdist.config.init_from import ReadOrigin, model_fields
from jaxdist.config.keys import keys, sections
from jaxdist.config.model import ModelConfig
from jaxdist.config.presets import load_preset
from jaxdist.config.run import RunConfig
from jaxdist.config.yaml_text import read_yaml, write_yaml

Layer = dict[str, Any]


def load(path: str | Path) -> RunConfig:
    """The config that a YAML file holds, such as the config.yaml beside a run."""
    return build([{"name": Path(path).stem}, read_layer(path)])


def to_yaml(config: RunConfig) -> str:
    """All of a config as YAML that `load` and `--config` read back to an equal one."""
    values = {
        name: {"preset": value.pop("preset"), **value} if name == "model" else value
        for name, value in thawed(asdict(config)).items()
    }
    return write_yaml(values)


def save_config(config: RunConfig, path: str | Path) -> None:
    """Write a config beside its run; a reader sees the old file or the new one, never half.

    UsageError where it cannot be written.
    """
    path = Path(path)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(to_yaml(config), encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def read_layer(path: str | Path) -> Layer:
    """What a YAML file sets; a key that does not exist is refused."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"config file {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"config file {path} is not a text in UTF-8") from None
    layer = read_yaml(text, f"config file {path}")
    _check_keys(layer, str(path))
    return layer


def build(layers: Iterable[Layer], read_origin: ReadOrigin | None = None) -> RunConfig:
    """The config that the layers make together; what none of them sets takes its default.

    A layer that names a preset replaces all that earlier layers said of the model. With
    `read_origin`, a run that has `init_from` takes model and tokenizer from there.
    """
    values: Layer = {}
    for layer in layers:
        if "preset" in layer.get("model", {}):
            values.pop("model", None)
        for name, value in layer.items():
            values[name] = {**values.get(name, {}), **value} if name in sections() else value
    if values.get("init_from") and read_origin is not None:
        _take_over(values, read_origin)
    values["model"] = _model_fields(values.get("model", {}))
    made = {
        name: sections()[name](**value) if name in sections() else value
        for name, value in values.items()
    }
    return RunConfig(**made)


def _take_over(values: Layer, read_origin: ReadOrigin) -> None:
    """Fill in what the model that the run starts from says."""
    init_from = values["init_from"]
    run_dir = values.get("output_dir") or f"runs/{values.get('name', 'run')}"
    limits.path("init_from", init_from)
    limits.path("output_dir", run_dir)
    origin = read_origin(init_from, Path(os.path.expanduser(run_dir)))
    values["model"] = model_fields(values.get("model", {}), origin.model, init_from)
    if origin.tokenizer is not None:
        values["data"] = {"tokenizer": origin.tokenizer, **values.get("data", {})}


def _model_fields(model: Layer) -> Layer:
    """The model's fields on top of its preset; `tiny` where nothing gives a shape."""
    required = {f.name for f in fields(ModelConfig) if f.default is MISSING}
    preset = model.get("preset")
    if preset is None and not required & model.keys():
        preset = "tiny"
    if preset is not None:
        return {**load_preset(preset), **model, "preset": preset}
    missing = sorted(required - model.keys())
    if missing:
        raise UsageError(
            f"model needs {', '.join(missing)}; set them, or start from a shape with --model.preset"
        )
    return model


def _check_keys(layer: Layer, where: str) -> None:
    for name, value in layer.items():
        if name in sections():
            if not isinstance(value, Mapping):
                raise UsageError(f"{where}: {name} must be a mapping of its keys to values")
            for key in value:
                _check_key(f"{name}.{key}", where)
        else:
            _check_key(name, where)


def _check_key(path: str, where: str) -> None:
    if path not in keys():
        hint = did_you_mean(path, [*keys(), *sections()])
        raise UsageError(f"{where}: {path} is not a key{hint or '; --help lists them'}")
