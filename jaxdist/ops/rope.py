"""Rotary position embedding (arXiv 2104.09864) and the scalings that stretch it to longer contexts.

Shapes: B batch rows, T tokens, N heads, H head dim, R = H / 2 rotation frequencies.

`rope_table` is made once for a forward pass, outside the layers; every block applies it with
`apply_rope`. Frequencies follow the definitions of Hugging Face transformers; those that do not
depend on the input are computed on the host in float64.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import ModelConfig

Rope = tuple[jax.Array, ...]  # cos [B, T, R], sin [B, T, R], fp32; then those of local layers


def rope_table(config: ModelConfig, positions_BT: jax.Array) -> Rope:
    """(cos, sin) [B, T, R] in fp32 of each position's angles, times the attention factor.

    Where layers with a sliding window have a base of their own, their (cos, sin) follow, or are
    the only ones where all layers have it; `layer_rope` takes a layer's.

    `dynamic` and `longrope` depend on the sequence length, here the largest position of each row
    plus one: a row's table is then the same whatever other rows share its batch or device.
    """
    length_B1 = jnp.max(positions_BT, axis=1, keepdims=True) + 1
    frequency_BR, attention_factor = _frequencies(config, length_B1)
    angle_BTR = positions_BT.astype(jnp.float32)[:, :, None] * frequency_BR[:, None, :]
    rope = jnp.cos(angle_BTR) * attention_factor, jnp.sin(angle_BTR) * attention_factor
    if config.rope_local_base_freq is None:
        return rope
    own = replace(config, rope_theta=config.rope_local_base_freq, rope_scaling=None)
    local = rope_table(replace(own, rope_local_base_freq=None), positions_BT)
    return local if config.sliding_window_pattern is None else (*rope, *local)


def layer_rope(rope: Rope, is_local: bool | jax.Array | None) -> Rope:
    """The (cos, sin) of a layer: of several tables, those of its kind."""
    if len(rope) == 2:
        return rope
    full, local = rope[:2], rope[2:]
    if isinstance(is_local, jax.Array):
        return jax.tree.map(lambda a, b: jnp.where(is_local, b, a), full, local)
    return local if is_local else full


def apply_rope(x_BTNH: jax.Array, rope: Rope) -> jax.Array:
    """Rotates the pairs (i, i + R) of each head, Hugging Face's half-split convention.

    The rotation is done in fp32; the result has x's dtype. Its backward is the rotation by the
    opposite angles, so that it keeps nothing but the tables; they get no gradient.
    """
    return _rotated(x_BTNH, *rope)


@jax.custom_vjp
def _rotated(x_BTNH: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array) -> jax.Array:
    cos_BT1R, sin_BT1R = cos_BTR[:, :, None, :], sin_BTR[:, :, None, :]
    first_BTNR, second_BTNR = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    out_BTNH = jnp.concatenate(
        [
            first_BTNR * cos_BT1R - second_BTNR * sin_BT1R,
            second_BTNR * cos_BT1R + first_BTNR * sin_BT1R,
        ],
        axis=-1,
    )
    return out_BTNH.astype(x_BTNH.dtype)


def _rotated_forward(x_BTNH: jax.Array, cos_BTR: jax.Array, sin_BTR: jax.Array):
    return _rotated(x_BTNH, cos_BTR, sin_BTR), (cos_BTR, sin_BTR)


def _rotated_backward(tables: Rope, g_BTNH: jax.Array):
    cos_BTR, sin_BTR = tables
    return _rotated(g_BTNH, cos_BTR, -sin_BTR), None, None


_rotated.defvjp(_rotated_forward, _rotated_backward)


def _frequencies(config: ModelConfig, length_B1: jax.Array) -> tuple[jax.Array, float]:
    """Radians a token, [B or 1, R] fp32, of rows of these lengths; and the attention factor."""
    scaling = _scaling(config)
    plain_R = _plain_frequencies(config)
    match scaling.get("rope_type", "default"):
        case "default":
            return _fixed(plain_R), 1.0
        case "linear":
            return _fixed(plain_R / scaling["factor"]), 1.0
        case "llama3":
            return _fixed(_llama3_frequencies(config, plain_R)), 1.0
        case "yarn":
            return _fixed(_yarn_frequencies(config, plain_R)), _yarn_attention_factor(config)
        case "dynamic":
            return _dynamic_frequencies(config, plain_R, length_B1), 1.0
        case "longrope":
            short_1R = _fixed(plain_R / np.array(scaling["short_factor"]))
            long_1R = _fixed(plain_R / np.array(scaling["long_factor"]))
            is_long_B1 = length_B1 > _original_length(config)
            return jnp.where(is_long_B1, long_1R, short_1R), _longrope_attention_factor(config)
        case unknown:
            raise ValueError(
                f"rope_scaling.rope_type={unknown!r} is unknown; "
                "choose default, linear, dynamic, yarn, llama3 or longrope"
            )


def _fixed(frequency_R: np.ndarray) -> jax.Array:
    """Frequencies that are the same for every row, [1, R]."""
    return jnp.asarray(frequency_R[None, :], jnp.float32)


def _scaling(config: ModelConfig) -> Mapping[str, Any]:
    return {} if config.rope_scaling is None else config.rope_scaling


def _plain_frequencies(config: ModelConfig) -> np.ndarray:
    """theta^(-2r / H) for r in 0..R-1, [R] float64, radians a token."""
    return config.rope_theta ** -(np.arange(0, config.rotary_dim, 2) / config.rotary_dim)


def _original_length(config: ModelConfig) -> int:
    """Context length of the first pre-training, before it was stretched; tokens."""
    original = _scaling(config).get("original_max_position_embeddings")
    return config.max_position_embeddings if original is None else original


def _stretch(config: ModelConfig) -> float:
    """The scaling's factor, by default the stretched context over the original one."""
    factor = _scaling(config).get("factor")
    return config.max_position_embeddings / _original_length(config) if factor is None else factor


def _dynamic_frequencies(
    config: ModelConfig, plain_R: np.ndarray, length_B1: jax.Array
) -> jax.Array:
    """NTK-aware base growth once a row is longer than the model's context, [B, R].

    theta grows by g^(H / (H - 2)), which is the plain frequency r times g^(-2r / (H - 2)).
    """
    factor, limit = _scaling(config)["factor"], config.max_position_embeddings
    length_B1 = jnp.maximum(length_B1, limit).astype(jnp.float32)
    growth_B1 = factor * length_B1 / limit - (factor - 1)
    num_frequencies = plain_R.size
    exponent_R = -np.arange(num_frequencies) / (num_frequencies - 1)
    return _fixed(plain_R) * growth_B1 ** _fixed(exponent_R)


def _llama3_frequencies(config: ModelConfig, plain_R: np.ndarray) -> np.ndarray:
    """Slow rotations are divided by the factor, fast ones kept, the band between blended."""
    scaling = _scaling(config)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns_R = _original_length(config) * plain_R / (2 * math.pi)  # within the original context
    keep_R = np.clip((turns_R - low) / (high - low), 0.0, 1.0)
    return plain_R * (keep_R + (1.0 - keep_R) / scaling["factor"])


def _yarn_frequencies(config: ModelConfig, plain_R: np.ndarray) -> np.ndarray:
    """Blend by frequency index between kept and interpolated (arXiv 2309.00071, section 3.2)."""
    scaling, head_dim = _scaling(config), 2 * plain_R.size

    def index_of(num_turns: float) -> float:
        """Index (in units of r) of the frequency that makes this many turns in the context."""
        turns = _original_length(config) / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(config.rope_theta))

    first = index_of(scaling.get("beta_fast") or 32)
    last = index_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = (last - first) or 0.001  # a ramp of no width is a step
    interpolate_R = np.clip((np.arange(plain_R.size) - first) / width, 0.0, 1.0)
    return plain_R * (1.0 - interpolate_R + interpolate_R / _stretch(config))


def _yarn_attention_factor(config: ModelConfig) -> float:
    """Scale of cos and sin, so that attention logits are sharpened by its square."""
    scaling = _scaling(config)
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]

    def mscale(weight: float) -> float:
        return max(1.0, 0.1 * weight * math.log(_stretch(config)) + 1.0)

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return mscale(scaling["mscale"]) / mscale(scaling["mscale_all_dim"])
    return mscale(1.0)


def _longrope_attention_factor(config: ModelConfig) -> float:
    """sqrt(1 + ln(stretch) / ln(original context)) (arXiv 2402.13753)."""
    given, stretch = _scaling(config).get("attention_factor"), _stretch(config)
    if given is not None:
        return given
    if stretch <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(stretch) / math.log(_original_length(config)))
