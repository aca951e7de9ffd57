"""Which settings a run may change when it resumes, and which would make it another run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

# Sections or fields that define what is learned, and from which stream of tokens. The rest (mesh,
# ZeRO, schedule, steps, learning rate, evaluation, logs ...) is the run's to change.
_FIXED = (
    "seed",
    "model",
    "data",
    "train.global_batch_size",
    "train.sequence_length",
    "optimizer.name",
)
# A preset is a nickname for fields that are compared themselves; a cache holds nothing new; a
# tokenizer may have moved, and what it does is part of the data's fingerprint.
_FREE = ("model.preset", "data.cache_dir", "data.tokenizer")


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What was changed that must not be, one line each: `model.hidden_size: 64 saved, 128 asked`.

    Both are configs as nested dicts (of `dataclasses.asdict` or JSON). A field that the saved one
    does not know, being older, counts as unchanged.
    """
    before, now = _fields(saved), _fields(current)
    return [
        f"{name}: {before[name]} saved, {now[name]} asked"
        for name in before
        if name in now and _is_fixed(name) and before[name] != now[name]
    ]


def new_decay(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What another number of steps does to the learning rate, in one line; empty for nothing.

    Both are configs as in `differences`.
    """
    before, now = saved["train"]["steps"], current["train"]["steps"]
    optimizer = current["optimizer"]
    counts = optimizer["schedule"] != "constant" or optimizer["warmup_steps"] is None
    if before == now or not counts:
        return ""
    return (
        f"train.steps: {before} saved, {now} asked; from here on the learning rate follows the "
        f"{optimizer['schedule']} schedule of {now} steps"
    )


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`section.field` -> value, in JSON's terms, so that a tuple equals its stored list."""
    flat: dict[str, Any] = {}
    for section, value in json.loads(json.dumps(config)).items():
        if isinstance(value, dict):
            flat.update({f"{section}.{field}": v for field, v in value.items()})
        else:
            flat[section] = value
    return flat


def _is_fixed(name: str) -> bool:
    return name not in _FREE and any(
        name == fixed or name.startswith(f"{fixed}.") for fixed in _FIXED
    )
