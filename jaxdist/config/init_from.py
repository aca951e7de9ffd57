"""What a run that starts from a given model takes over from it, and what may differ."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from jaxdist.config.errors import UsageError
from jaxdist.config.model import ModelConfig
from jaxdist.config.presets import load_preset

# Fields that leave the weights' meaning as it is: how long a context they are stretched to, how
# new weights would be drawn, how many rows pad the vocabulary.
FREE = (
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "initializer_range",
    "vocab_multiple",
)
UNSEEN = ("initializer_range", "vocab_multiple", "preset")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A model that a run may start from.

    Attributes:
        model: Its shape.
        tokenizer: Its tokenizer, as `data.tokenizer` names one; None where it has none.
    """

    model: ModelConfig
    tokenizer: str | None


# (init_from, the run's folder) -> the model there.
ReadOrigin = Callable[[str, Path], Origin]


def model_fields(given: Mapping[str, Any], origin: ModelConfig, init_from: str) -> dict[str, Any]:
    """Fields of the run's model: the origin's, with those `given` that may differ.

    UsageError, naming the fields, where the weights would not fit or would mean something else.
    """
    theirs = asdict(origin)
    preset = load_preset(given["preset"]) if given.get("preset") else {}
    # A preset is meant to be the same model; a single field may be changed on purpose.
    named = ModelConfig(**{**theirs, **preset, "preset": None}) if preset else origin
    _refuse(_differing(named, origin, UNSEEN), named, origin, init_from)
    wanted = ModelConfig(**{**theirs, **given})
    check_same_weights(wanted, origin, init_from)
    return {**theirs, **given}


def check_same_weights(model: ModelConfig, origin: ModelConfig, init_from: str) -> None:
    """Refuse a model that the origin's weights do not fit, naming the fields."""
    _refuse(_differing(model, origin, (*FREE, "preset")), model, origin, init_from)


def _differing(model: ModelConfig, origin: ModelConfig, free: tuple[str, ...]) -> list[str]:
    return [
        f.name
        for f in fields(ModelConfig)
        if f.name not in free and getattr(model, f.name) != getattr(origin, f.name)
    ]


def _refuse(names: list[str], model: ModelConfig, origin: ModelConfig, init_from: str) -> None:
    if names:
        listed = "; ".join(
            f"model.{name}={getattr(model, name)}, but {getattr(origin, name)} there"
            for name in names
        )
        raise UsageError(
            f"init_from={init_from} holds another model: {listed}; leave the model section out, "
            "which takes it from there"
        )
