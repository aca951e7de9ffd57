"""ModelConfig to and from Hugging Face's config.json."""

from collections.abc import Mapping
from typing import Any

from jaxdist.config import ModelConfig, limits
from jaxdist.config.errors import UsageError
from jaxdist.config.frozen import thawed
from jaxdist.interop.huggingface.families import FAMILIES
from jaxdist.interop.huggingface.family import Family
from jaxdist.interop.huggingface.membership import architecture_for, family_of

REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
BASE_DEFAULTS = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
# Keys that change the arithmetic in ways ModelConfig cannot express, and what they may say.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}
ORIGINAL = "original_max_position_embeddings"
LAYER_KINDS = {"full_attention", "sliding_attention"}
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
    values = {family.renamed.get(key, key): value for key, value in values.items()}
    known = {**BASE_DEFAULTS, **family.defaults, **values}
    if family.implies.get("position_embedding") == "learned":
        known |= {"num_key_value_heads": None, "head_dim": None}  # not keys of such models
    activation, *activations = family.activation
    neutral = {**NEUTRAL, **family.neutral, activation: tuple(activations)}
    for key, allowed in neutral.items():
        if key in known and known[key] not in allowed:
            asked = str(known[key])[:80]
            raise UsageError(f"{where}: {key}={asked} asks for what no model here can express")
    if family.key("intermediate_size") == "n_inner" and known.get("n_inner") is None:
        known["n_inner"] = 4 * known["n_embd"] if isinstance(known.get("n_embd"), int) else None
    needed = {name: family.key(name) for name in REQUIRED}
    missing = [key for key in needed.values() if known.get(key) is None]
    if missing:
        raise UsageError(f"{where}: {', '.join(missing)} missing")
    optional = {"initializer_range"} & values.keys()
    own = {name: key for name, key in family.keys.items() if known.get(key) is not None}
    try:
        found = {
            **{name: known[key] for name, key in needed.items()},
            **{key: values[key] for key in optional},
            "num_key_value_heads": known.get("num_key_value_heads") or 0,
            "head_dim": known.get("head_dim") or 0,
            "max_position_embeddings": known[family.key("max_position_embeddings")],
            "rms_norm_eps": known[family.key("rms_norm_eps")],
            "tie_word_embeddings": known["tie_word_embeddings"],
            **{name: known[key] for name, key in own.items()},
            **_windows(family, known, where),
            **family.implies,
            **{name: known.get(key, False) for name, key in family.switches.items()},
            **_rope(family, known, where),
        }
        if found["sliding_window"] is None:
            found.pop("rope_local_base_freq", None)
        return ModelConfig(**found)
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
    if not isinstance(model_type, str) or model_type not in of_type:
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
    named = origin.get("architectures")
    architecture = architecture_for(config, named[0] if named and isinstance(named, list) else None)
    family = FAMILIES[architecture]
    sizes = [*REQUIRED, "max_position_embeddings", "rms_norm_eps"]
    rope: dict[str, Any] = {}
    if config.position_embedding == "rope":
        sizes += ["num_key_value_heads", *(() if config.kv_lora_rank else ("head_dim",))]
        rope = {"rope_theta": config.rope_theta, "rope_scaling": thawed(config.rope_scaling)}
        original = (config.rope_scaling or {}).get(ORIGINAL)
        if original is not None and ORIGINAL in family.defaults:
            rope[ORIGINAL] = original
    activation, written, *_ = family.activation
    return {
        "architectures": [architecture],
        "model_type": family.model_type,
        **{family.key(name): getattr(config, name) for name in sizes},
        **{key: getattr(config, name) for name, key in family.keys.items()},
        **({} if config.q_lora_rank or not config.kv_lora_rank else {"q_lora_rank": None}),
        activation: written,
        **rope,
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


def _rope(family: Family, known: Mapping[str, Any], where: str) -> dict[str, Any]:
    """rope_theta, rope_scaling and, where some layers have their own, rope_local_base_freq."""
    name = next((key for key in ROPE if known.get(key)), ROPE[0])
    given = known.get(name) or {}
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: {name} must be a mapping")
    found: dict[str, Any] = {}
    nested = {key: value for key, value in given.items() if isinstance(value, Mapping)}
    if nested:
        local = nested.get("sliding_attention", {})
        plain = local.get("rope_type", "default") == "default"
        if "rope_local_base_freq" not in family.keys or not (
            nested.keys() <= LAYER_KINDS and plain
        ):
            raise UsageError(
                f"{where}: {name} differs between layers ({', '.join(nested)}), which no model "
                "here can express"
            )
        given = nested.get("full_attention", {})
        if "rope_theta" in local:
            found["rope_local_base_freq"] = local["rope_theta"]
    scaling = dict(given)
    theta = scaling.pop("rope_theta", None) or known.get("rope_theta") or 10000.0
    partial = scaling.pop("partial_rotary_factor", None)
    if partial not in NEUTRAL["partial_rotary_factor"]:
        raise UsageError(f"{where}: {name}.partial_rotary_factor={partial} is not 1")
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "su":  # the first name of longrope
        scaling = {"rope_type": "longrope", **scaling, "type": "longrope"}
        kind = scaling["rope_type"] = "longrope"
    if kind in (None, "default") and not scaling.keys() - {"rope_type", "type"}:
        return {"rope_theta": theta, "rope_scaling": None, **found}
    original = known.get(ORIGINAL)
    if original is not None and kind in ("longrope", "yarn"):
        scaling.setdefault(ORIGINAL, original)
    return {"rope_theta": theta, "rope_scaling": scaling, **found}


def _windows(family: Family, known: Mapping[str, Any], where: str) -> dict[str, int | None]:
    """sliding_window and sliding_window_pattern."""
    window = known.get("sliding_window", 4096)
    if family.window == "by layer":
        return _windows_by_layer(family, known, window, where)
    if family.window == "by size":
        return {"sliding_window": window}
    if family.window == "never" or not known.get("use_sliding_window") or window is None:
        return {"sliding_window": None}
    layers = known["num_hidden_layers"]
    full = known.get("max_window_layers", 28)  # this many from the first on attend to everything
    limits.whole("num_hidden_layers", layers, 1)
    limits.whole("max_window_layers", full, 0)
    kinds = _layer_kinds(known, where)
    if kinds is None:
        kinds = ["full_attention"] * (full > 0) + ["sliding_attention"] * (full < layers)
    if len(set(kinds)) > 1:
        raise UsageError(
            f"{where}: only some of the {layers} layers have a sliding window (max_window_layers, "
            "layer_types), which no model here can express"
        )
    return {"sliding_window": window if kinds[0] == "sliding_attention" else None}


def _windows_by_layer(
    family: Family, known: Mapping[str, Any], window: Any, where: str
) -> dict[str, int | None]:
    pattern = known.get("sliding_window_pattern", family.pattern)
    kinds = _layer_kinds(known, where)
    if pattern is not None:
        limits.whole("sliding_window_pattern", pattern, 2)
    if window is None or kinds is None:
        return {"sliding_window": window, "sliding_window_pattern": window and pattern}
    local = [kind == "sliding_attention" for kind in kinds]
    if not any(local):
        return {"sliding_window": None, "sliding_window_pattern": None}
    for every in (pattern, *range(2, len(local) + 1), None):
        if local == [every is None or (layer + 1) % every != 0 for layer in range(len(local))]:
            return {"sliding_window": window, "sliding_window_pattern": every}
    raise UsageError(
        f"{where}: layer_types is none of the patterns here, in which every n-th layer attends to "
        "all tokens"
    )


def _layer_kinds(known: Mapping[str, Any], where: str) -> list[str] | None:
    """layer_types; None where config.json has none."""
    kinds = known.get("layer_types")
    if not kinds:
        return None
    if not isinstance(kinds, list) or not set(map(str, kinds)) <= LAYER_KINDS:
        listed = ", ".join(sorted(LAYER_KINDS))
        raise UsageError(f"{where}: layer_types={str(kinds)[:80]} must list {listed}")
    return kinds


def _window_keys(family: Family, config: ModelConfig) -> dict[str, Any]:
    window, layers = config.sliding_window, config.num_hidden_layers
    if family.window == "never":
        return {}
    if family.window == "by size":
        return {"sliding_window": window}
    if family.window == "by layer":
        local = map(config.is_local, range(layers))
        kinds = ["sliding_attention" if is_local else "full_attention" for is_local in local]
        pattern = config.sliding_window_pattern
        return {
            "sliding_window": window,
            "layer_types": kinds,
            **({} if pattern is None else {"sliding_window_pattern": pattern}),
        }
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": layers if window is None else 0,
    }
