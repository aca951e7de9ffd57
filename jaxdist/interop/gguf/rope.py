"""RoPE scaling in a GGUF file: metadata keys, and tensors of factors, to and from `rope_scaling`.

Linear and YaRN are keys. The scaling of Llama 3 and LongRoPE are tensors of R = head_dim / 2
divisors of the frequencies; those of Llama 3 are turned back into its four numbers. Source:
llama.cpp's converter and the definitions of transformers.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxdist.config import ModelConfig
from jaxdist.config.errors import UsageError
from jaxdist.interop.gguf.fields import Fields, shortest
from jaxdist.ops.rope import rope_table
from jaxdist.quantization.gguf_dequantize import dequantize

LLAMA3 = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
TENSORS = (LLAMA3, LONG, SHORT)
TOLERANCE = 1e-4  # relative; the tensor's factors were computed in fp32


def read_rope_scaling(fields: Fields, config: ModelConfig) -> dict[str, Any] | None:
    """Hugging Face's dict, or None. Raises UsageError for what it cannot express.

    `config` is the file's model without it.
    """
    tensors, head_dim, theta = fields.header.tensors, config.rotary_dim, config.rope_theta
    if LONG in tensors and SHORT in tensors:
        return _optional(
            rope_type="longrope",
            short_factor=[shortest(value) for value in _factors(fields, SHORT, head_dim)],
            long_factor=[shortest(value) for value in _factors(fields, LONG, head_dim)],
            original_max_position_embeddings=_original_length(fields),
            attention_factor=fields.number("rope.scaling.attn_factor", None),
        )
    if LLAMA3 in tensors:
        return _read_llama3(fields, _factors(fields, LLAMA3, head_dim), theta)
    legacy = fields.number("rope.scale_linear", 1.0)  # until 2023
    kind = fields.text("rope.scaling.type", "none" if legacy == 1 else "linear")
    match kind:
        case "none":
            return None
        case "linear":
            factor = fields.number("rope.scaling.factor", legacy)
            return None if factor == 1 else {"rope_type": "linear", "factor": factor}
        case "yarn":
            return _read_latent_yarn(fields) if config.kv_lora_rank else _read_yarn(fields)
        case _:
            fields.fail("rope.scaling.type", f"{kind!r} is not one of none, linear, yarn")


def rope_scaling_entries(config: ModelConfig) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """(metadata keys without the architecture's prefix, fp32 tensors) that say `rope_scaling`."""
    scaling = config.rope_scaling or {"rope_type": "none"}
    kind = scaling["rope_type"]
    if kind == "none":
        return {}, {}
    if kind == "linear":
        return {"rope.scaling.type": kind, "rope.scaling.factor": scaling["factor"]}, {}
    if kind == "yarn" and scaling.get("truncate", True):
        latent = bool(config.kv_lora_rank)
        return (_latent_yarn_keys if latent else _yarn_keys)(config, scaling), {}
    if kind == "llama3":
        numbers = {k: v for k, v in scaling.items() if k != "rope_type"}
        factors = llama3_factors(_frequencies(config.rotary_dim, config.rope_theta), **numbers)
        return {}, {LLAMA3: factors.astype(np.float32)}
    if kind == "longrope":
        keys = {"rope.scaling.type": kind, "rope.scaling.attn_factor": _attention_factor(config)}
        original = scaling.get("original_max_position_embeddings")
        keys["rope.scaling.original_context_length"] = original or config.max_position_embeddings
        return keys, {
            LONG: np.array(scaling["long_factor"], np.float32),
            SHORT: np.array(scaling["short_factor"], np.float32),
        }
    raise UsageError(
        f"model.rope_scaling={dict(scaling)} has no form in GGUF; it knows linear, yarn (with "
        "truncate), llama3 and longrope: keep the model in a Hugging Face folder"
    )


def llama3_factors(
    frequency_R: np.ndarray,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: int,
) -> np.ndarray:
    """By what Llama 3's scaling divides each frequency (radians a token), [R] float64."""
    turns_R = original_max_position_embeddings * frequency_R / (2 * math.pi)
    keep_R = np.clip((turns_R - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return 1 / ((1 - keep_R) / factor + keep_R)


def _read_llama3(fields: Fields, factors_R: np.ndarray, theta: float) -> dict[str, Any] | None:
    factor = float(factors_R.max())
    if factors_R.min() <= 0 or not np.isfinite(factor):
        raise UsageError(f"{fields.header.path}: tensor {LLAMA3!r} holds factors that are not > 0")
    if np.allclose(factors_R, 1, rtol=TOLERANCE):
        return None  # as older converters wrote for models without scaling
    frequency_R = _frequencies(2 * factors_R.size, theta)
    for length, high in _llama3_candidates(factors_R, factor, frequency_R):
        numbers = {
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": length,
        }
        if np.allclose(factors_R, llama3_factors(frequency_R, **numbers), rtol=TOLERANCE):
            return {"rope_type": "llama3", **numbers}
    raise UsageError(
        f"{fields.header.path}: tensor {LLAMA3!r} holds factors that are not those of Llama 3's "
        "RoPE scaling, the only one known in this form"
    )


def _llama3_candidates(
    factors_R: np.ndarray, factor: float, frequency_R: np.ndarray
) -> Iterator[tuple[int, float]]:
    """(original context L in tokens, high_freq_factor h) that may have made these factors.

    Only the ratios of (low, high, L) count, so low is 1 in all of them. Between the bounds
    1 / factors is affine in the frequency f: keep = (f L / 2 pi - 1) / (h - 1).
    """
    yield 8192, 4.0  # every published model
    keep_R = (1 / factors_R - 1 / factor) / (1 - 1 / factor)
    inside_R = (keep_R > TOLERANCE) & (keep_R < 1 - TOLERANCE)
    keep_R, frequency_R = keep_R[inside_R], frequency_R[inside_R]
    if keep_R.size:  # another context
        yield _context(2 * math.pi * (1 + 3 * keep_R[0]) / frequency_R[0]), 4.0
    if keep_R.size > 1:  # another band
        slope, offset = np.polyfit(frequency_R, keep_R, 1)
        if slope > 0 > offset:
            yield _context(-2 * math.pi * slope / offset), float(1 - 1 / offset)


def _context(length: float) -> int:
    return round(min(length, 2.0**31))  # a damaged file may ask for infinity


def _read_yarn(fields: Fields) -> dict[str, Any]:
    _check_yarn(fields)
    if fields.number("rope.scaling.yarn_log_multiplier", 0.0) != 0:
        fields.fail("rope.scaling.yarn_log_multiplier", "is not 0: no model here can express it")
    factor = fields.number("rope.scaling.factor")
    own = fields.number("rope.scaling.attn_factor", 1.0)
    attention = None if own == 1 else own * _yarn_default(factor)
    return _optional(attention_factor=attention, **_yarn_fields(fields))


def _read_latent_yarn(fields: Fields) -> dict[str, Any]:
    """DeepSeek's: cosine and sine are not scaled, but the attention scores are."""
    _check_yarn(fields)
    if fields.number("rope.scaling.attn_factor", 1.0) != 1:
        fields.fail("rope.scaling.attn_factor", "is not 1, which no model here can express")
    weight = float(f"{10 * fields.number('rope.scaling.yarn_log_multiplier'):.6g}")
    return _optional(mscale=weight, mscale_all_dim=weight, **_yarn_fields(fields))


def _check_yarn(fields: Fields) -> None:
    for key in ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"):
        if fields.number(key, 1.0) not in (1.0, -1.0):  # -1 asks for the default, which is 1
            fields.fail(key, "is not 1, which no model here can express")


def _yarn_fields(fields: Fields) -> dict[str, Any]:
    return {
        "rope_type": "yarn",
        "factor": fields.number("rope.scaling.factor"),
        "original_max_position_embeddings": _original_length(fields),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", None),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", None),
    }


def _yarn_keys(config: ModelConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    # llama.cpp multiplies its own default by this.
    own = _attention_factor(config) / _yarn_default(scaling["factor"])
    return {"rope.scaling.attn_factor": own, **_common_yarn_keys(config, scaling)}


def _latent_yarn_keys(config: ModelConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    weight = scaling.get("mscale_all_dim")
    if not weight or not math.isclose(_attention_factor(config), 1, rel_tol=TOLERANCE):
        raise UsageError(
            f"model.rope_scaling={dict(scaling)} has no form in GGUF with latent attention unless "
            "mscale equals mscale_all_dim; keep the model in a Hugging Face folder"
        )
    # A tenth of it, though it is multiplied by the tenth once more: so the first files were.
    log = {"rope.scaling.yarn_log_multiplier": 0.1 * weight}
    return {**log, **_common_yarn_keys(config, scaling)}


def _common_yarn_keys(config: ModelConfig, scaling: Mapping[str, Any]) -> dict[str, Any]:
    original = scaling.get("original_max_position_embeddings") or config.max_position_embeddings
    return _optional(
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": scaling["factor"],
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": scaling.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": scaling.get("beta_slow"),
        }
    )


def _yarn_default(factor: float) -> float:
    return 1 + 0.1 * math.log(max(factor, 1.0))


def _attention_factor(config: ModelConfig) -> float:
    """What scales cos and sin: at position 0 the cosine is nothing else."""
    cos_BTR, _ = rope_table(config, jnp.zeros((1, 1), jnp.int32))
    return float(cos_BTR[0, 0, 0])


def _factors(fields: Fields, name: str, head_dim: int) -> np.ndarray:
    info = fields.header.tensors[name]
    if info.shape != (head_dim // 2,):
        raise UsageError(
            f"{fields.header.path}: tensor {name!r} has shape {info.shape}, expected "
            f"({head_dim // 2},), one a frequency"
        )
    return dequantize(fields.header.raw(name), info.type, name).astype(np.float64)


def _frequencies(head_dim: int, theta: float) -> np.ndarray:
    """theta^(-2r / H), [R] float64, radians a token."""
    return theta ** -(np.arange(0, head_dim, 2) / head_dim)


def _original_length(fields: Fields) -> int | None:
    return fields.whole("rope.scaling.original_context_length", None)


def _optional(**entries: Any) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}
