"""The `rope_scaling` dict of a Hugging Face config: its kinds and their fields."""

from collections.abc import Mapping
from typing import Any

from jaxdist.config import limits
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.frozen import FrozenDict

NAME = "model.rope_scaling"

# kind -> (required fields, optional fields), as in transformers' modeling_rope_utils.
KINDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
    "llama3": (
        frozenset(
            {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}
        ),
        frozenset(),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"original_max_position_embeddings", "factor", "attention_factor"}),
    ),
}


def checked(scaling: Mapping[str, Any], head_dim: int) -> FrozenDict | None:
    """The dict with its kind under `rope_type`; None for the kind `default`, which is no scaling.

    Unknown kinds and fields are refused: a scaling that is ignored gives a model that is
    wrong only on long texts, where nobody looks.
    """
    if not isinstance(scaling, Mapping):
        raise UsageError(
            f"{NAME}={scaling!r} must be a mapping such as {{rope_type: linear, factor: 2.0}}"
        )
    fields = dict(scaling)
    kind = fields.pop("rope_type", None)
    legacy = fields.pop("type", kind)  # the field's name before transformers 4.43
    kind = kind or legacy
    if kind == "default" and not fields:
        return None
    limits.choice(f"{NAME}.rope_type", kind, tuple(KINDS))
    required, optional = KINDS[kind]
    for name in fields:
        if name not in required | optional:
            hint = did_you_mean(name, required | optional)
            allowed = ", ".join(sorted(required | optional))
            raise UsageError(
                f"{NAME}.{name} is not a field of rope_type {kind} (it has {allowed}){hint}"
            )
    missing = sorted(required - fields.keys())
    if missing:
        raise UsageError(f"{NAME} of rope_type {kind} needs {', '.join(missing)}")
    for name, value in fields.items():
        if value is not None or name in required:
            _check_field(name, value, head_dim)
    if kind == "llama3" and not fields["low_freq_factor"] < fields["high_freq_factor"]:
        raise UsageError(
            f"{NAME}.low_freq_factor={fields['low_freq_factor']} must be less than "
            f"high_freq_factor={fields['high_freq_factor']}"
        )
    return FrozenDict({"rope_type": kind, **fields})


def _check_field(name: str, value: Any, head_dim: int) -> None:
    full = f"{NAME}.{name}"
    if name in ("short_factor", "long_factor"):
        if not isinstance(value, (list, tuple)) or len(value) != head_dim // 2:
            given = len(value) if isinstance(value, (list, tuple)) else repr(value)
            raise UsageError(
                f"{full} must list head_dim/2={head_dim // 2} numbers, one a frequency; got {given}"
            )
        for item in value:
            limits.number(full, item, above=0)
    elif name == "truncate":
        limits.flag(full, value)
    elif name == "original_max_position_embeddings":
        limits.whole(full, value, 1)
    elif name == "factor":
        limits.number(full, value, minimum=1)
    else:
        limits.number(full, value, above=0)
