"""What a checkpoint tells of its run, and which settings a run may change when it resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdist.config import UsageError

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
# tokenizer may have moved, and what it does is part of the data's fingerprint; what is validated on
# trains nothing, and what it leaves to train on is compared by itself.
_FREE = (
    "model.preset",
    "data.cache_dir",
    "data.tokenizer",
    "data.validation_fraction",
    "data.validation_sources",
)
# What the loop saves beside the arrays, and of which type.
_RECORD = {"config": Mapping, "data": str, "tokens": int}


def check_record(record: Mapping[str, Any], checkpoint: Path) -> None:
    """Refuse a checkpoint whose JSON `record` is not one of a training run's, naming what is wrong.

    `checkpoint` is its folder.
    """
    wrong = [name for name, kind in _RECORD.items() if not isinstance(record.get(name), kind)]
    if not wrong and not isinstance(record["config"].get("train"), Mapping):
        wrong = ["config"]
    if wrong:
        raise UsageError(
            f"the checkpoint {checkpoint} has no usable {', '.join(wrong)} in extra/metadata, so "
            "it cannot be told which run it belongs to: remove it to go on from the one before, "
            "or choose another --output-dir"
        )


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """What was changed that must not be, one line each: `model.hidden_size: 64 saved, 128 asked`.

    Both are configs as nested dicts (of `dataclasses.asdict` or JSON). A field that the saved one
    does not know, being older, counts as unchanged.
    """
    before, now = _fields(saved), _fields(current)
    changed = [
        name for name in before if name in now and _is_fixed(name) and before[name] != now[name]
    ]
    if _held_back(before) != _held_back(now):
        with_sources = ("data.validation_sources", "data.validation_fraction")
        changed += [name for name in with_sources if before.get(name) != now.get(name)]
    return [f"{name}: {before.get(name)} saved, {now.get(name)} asked" for name in changed]


def new_decay(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What another number of steps does to the learning rate, in one line; empty for nothing.

    Both are configs as in `differences`.
    """
    before, now = saved["train"].get("steps"), current["train"]["steps"]
    optimizer = current["optimizer"]
    counts = optimizer["schedule"] != "constant" or optimizer["warmup_steps"] is None
    if before == now or not counts:
        return ""
    return (
        f"train.steps: {before} saved, {now} asked; from here on the learning rate follows the "
        f"{optimizer['schedule']} schedule of {now} steps"
    )


def new_learning(saved: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Which free settings of the optimizer and the number formats differ, in one line, or empty.

    They are what an evaluation or a mesh is not: the loss takes another course from here on. Both
    are configs as in `differences`.
    """
    before, now = _fields(saved), _fields(current)
    changed = [
        f"{name}: {before[name]} saved, {now[name]} asked"
        for name in before
        if name.startswith(("optimizer.", "precision."))
        if name in now and before[name] != now[name]
    ]
    return f"{'; '.join(changed)}; as asked from here on" if changed else ""


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """`section.field` -> value, in JSON's terms, so that a tuple equals its stored list."""
    flat: dict[str, Any] = {}
    for section, value in json.loads(json.dumps(config)).items():
        if isinstance(value, dict):
            flat.update({f"{section}.{field}": v for field, v in value.items()})
        else:
            flat[section] = value
    return flat


def _held_back(fields: Mapping[str, Any]) -> float:
    """Part of `data.sources` that is kept from training: none where others are validated on."""
    sources = fields.get("data.validation_sources")
    return 0.0 if sources else fields.get("data.validation_fraction", 0.0)


def _is_fixed(name: str) -> bool:
    return name not in _FREE and any(
        name == fixed or name.startswith(f"{fixed}.") for fixed in _FIXED
    )
