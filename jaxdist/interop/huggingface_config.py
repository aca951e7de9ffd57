"""ModelConfig to and from Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.config.frozen import thawed
from jaxdist.interop.huggingface_families import (
    BASE_DEFAULTS,
    FAMILIES,
    Family,
    architecture_for,
    family_of,
)

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Keys that change the arithmetic in ways ModelConfig cannot express, and what they may say.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
ROPE = ("rope_parameters", "rope_scaling")  # the key since transformers 5, and before
# What a token is used for, which only the tokenizer and the generation know.
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_config(values: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        values: Its content.
        where: The file's path, for messages.

    Raises:
        UsageError: For an architecture, field or value that our model does not express.
    """
    family = family_of(architecture_of(values, where), where)
    known = {**BASE_DEFAULTS, **family.defaults, **values}
    for key, neutral in NEUTRAL.items():
        if key in known and known[key] not in neutral:
            asked = str(known[key])[:80]
            raise UsageError(f"{where}: {key}={asked} asks for what no model here can express")
    missing = [key for key in REQUIRED if key not in values]
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} missing")
    theta, scaling = _rope(known, where)
    optional = {"initializer_range"} & values.keys()
    try:
        return ModelConfig(
            **{key: values[key] for key in (*REQUIRED, *optional)},
            num_key_value_heads=known.get("num_key_value_heads") or 0,
            head_dim=known.get("head_dim") or 0,
            max_position_embeddings=known["max_position_embeddings"],
            rms_norm_eps=known["rms_norm_eps"],
            rope_theta=theta,
            rope_scaling=scaling,
            sliding_window=_window(family, known, where),
            tie_word_embeddings=known["tie_word_embeddings"],
            **family.implies,
            **{name: known.get(key, False) for name, key in family.switches.items()},
        )
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from error


def architecture_of(values: Mapping[str, Any], where: str) -> str:
    """The name of the model's class; by model_type in the files that do not say it."""
    named = values.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        return named[0]
    if named:
        raise UsageError(f"{where}: architectures={str(named)[:80]} must name one architecture")
    of_type = {family.model_type: name for name, family in FAMILIES.items()}
    model_type = values.get("model_type")
    if model_type not in of_type:
        raise UsageError(
            f"{where}: neither architectures nor model_type={str(model_type)[:80]!r} names one of "
            f"{', '.join(FAMILIES)}; a model's folder is needed"
        )
    return of_type[model_type]


def write_config(
    config: ModelConfig, dtype: str, origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content of config.json.

    Args:
        config: The model.
        dtype: Of the weights beside it, such as "bfloat16".
        origin: The config.json that the model came with, whose tokens and architecture are kept.
    """
    origin = origin or {}
    architectures = origin.get("architectures") or [None]
    architecture = architecture_for(config, architectures[0])
    family = FAMILIES[architecture]
    sizes = (*REQUIRED, "num_key_value_heads", "head_dim", "max_position_embeddings")
    return {
        "architectures": [architecture],
        "model_type": family.model_type,
        **{key: getattr(config, key) for key in sizes},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": thawed(config.rope_scaling),
        **_window_keys(family, config),
        **{key: getattr(config, name) for name, key in family.switches.items()},
        "tie_word_embeddings": config.tie_word_embeddings,
        "initializer_range": config.initializer_range,
        **{key: origin.get(key) for key in TOKENS},
        "attention_dropout": 0.0,
        "use_cache": True,
        "torch_dtype": dtype,
    }


def stored_dtype(values: Mapping[str, Any]) -> str | None:
    """What config.json says of its weights' dtype, such as "bfloat16"."""
    dtype = values.get("dtype") or values.get("torch_dtype")
    return dtype if isinstance(dtype, str) else None


def _rope(known: Mapping[str, Any], where: str) -> tuple[Any, dict[str, Any] | None]:
    """(theta, scaling or None)."""
    name = next((key for key in ROPE if known.get(key)), ROPE[0])
    given = known.get(name) or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: {name} must be a mapping")
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise UsageError(
            f"{where}: {name} differs between layers ({', '.join(nested)}), which no model here "
            "can express"
        )
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None) or known.get("rope_theta") or 10000.0
    partial = scaling.pop("partial_rotary_factor", None)
    if partial not in NEUTRAL["partial_rotary_factor"]:
        raise UsageError(f"{where}: {name}.partial_rotary_factor={partial} is not 1")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in (None, "default") and not scaling.keys() - {"rope_type", "type"}:
        return theta, None
    original = known.get("original_max_position_embeddings")
    if original is not None and kind in ("longrope", "yarn"):
        scaling.setdefault("original_max_position_embeddings", original)
    return theta, scaling


def _window(family: Family, known: Mapping[str, Any], where: str) -> int | None:
    """Size of the sliding window of all layers, in tokens; None for none."""
    window = known.get("sliding_window", 4096)
    if family.window == "by size":
        return window
    if family.window == "never" or not known.get("use_sliding_window") or window is None:
        return None
    layers = known["num_hidden_layers"]
    full = known.get("max_window_layers", 28)  # this many from the first on attend to everything
    kinds = known.get("layer_types") or (["full_attention"] if full > 0 else ["sliding_attention"])
    if known.get("layer_types") is None and 0 < full < layers:
        kinds = ["full_attention", "sliding_attention"]
    if len(set(kinds)) > 1:
        raise UsageError(
            f"{where}: only some of the {layers} layers have a sliding window (max_window_layers, "
            "layer_types), which no model here can express"
        )
    return window if kinds[0] == "sliding_attention" else None


def _window_keys(family: Family, config: ModelConfig) -> dict[str, Any]:
    window, layers = config.sliding_window, config.num_hidden_layers
    if family.window == "never":
        return {}
    if family.window == "by size":
        return {"sliding_window": window}
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": layers if window is None else 0,
    }
