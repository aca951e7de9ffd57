"""Weights kept in the blocks of a GGUF file, on the device, until they are multiplied.

Shapes: K inputs and N outputs of a product, B blocks along K, W weights a block, T tokens; leading
dims (...) are layers or experts. A packed weight is stored by outputs, [..., N, B, part], because
blocks run along K. N and B are whole dims of every part, so either can be sharded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdist.ops.dot import dot
from jaxdist.ops.product import product
from jaxdist.quantization.gguf_types import BY_NAME

Parts = Mapping[str, Any]  # arrays [..., N, B, part] by the names of `LAYOUTS`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight [..., K, N] as the integers of its blocks: a pytree whose leaves are the parts.

    Fp16 scales travel as their bits in uint16, so that no backend widens a stack of them.
    """

    parts: Parts
    type_name: str = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., K, N], as the dequantized weight would be."""
        *leading, outputs, blocks, _ = next(iter(self.parts.values())).shape
        return (*leading, blocks * BY_NAME[self.type_name].block_size, outputs)

    def __getitem__(self, index: Any) -> "PackedWeight":
        """One layer, or some, of a stack."""
        return jax.tree.map(lambda part: part[index], self)


def pack(raw: np.ndarray, type_name: str) -> PackedWeight:
    """Split stored rows [..., N, bytes] uint8 of a type of `LAYOUTS` into parts, on the host."""
    blocks = raw.reshape(*raw.shape[:-1], -1, BY_NAME[type_name].num_bytes)
    parts: dict[str, np.ndarray] = {}
    start = 0
    for name, (num_bytes, dtype) in LAYOUTS[type_name].parts.items():
        parts[name] = np.ascontiguousarray(blocks[..., start : start + num_bytes]).view(dtype)
        start += num_bytes
    return PackedWeight(parts=parts, type_name=type_name)


def unpack(packed: PackedWeight) -> jax.Array:
    """The fp32 weights by outputs, [..., N, K]."""
    weights = LAYOUTS[packed.type_name].unpack(packed.parts)
    return weights.reshape(*weights.shape[:-3], -1)


def packed_dot(x: jax.Array, packed: PackedWeight, compute_dtype: DTypeLike) -> jax.Array:
    """x [..., K] times a packed [K, N] -> [..., N], as `ops.dot` of the dequantized weight."""
    weights_NK = unpack(packed).astype(compute_dtype)
    out = product(x, weights_NK, ((x.ndim - 1,), (1,)), compute_dtype=compute_dtype)
    return out.astype(compute_dtype)


def dot_of_either(x: jax.Array, weight: Any, compute_dtype: DTypeLike) -> jax.Array:
    """`ops.dot`, or `packed_dot` of a packed weight: the `dot` of a Context."""
    if isinstance(weight, PackedWeight):
        return packed_dot(x, weight, compute_dtype)
    return dot(x, weight, compute_dtype)


def packed_rows(packed: PackedWeight, ids: jax.Array) -> jax.Array:
    """Rows of a packed table: for ids [...] below N, fp32 [..., K]. An embedding lookup."""
    return unpack(packed[ids])


def _halves(bits: jax.Array) -> jax.Array:
    """The numbers whose fp16 bits these are, in fp32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _nibbles(packed: jax.Array, group: int) -> jax.Array:
    """0 to 15, [..., G, group]: of each `group` bytes the low halves, then the high ones."""
    groups = packed.reshape(*packed.shape[:-1], -1, 1, group)
    split = jnp.concatenate([groups & 15, groups >> 4], axis=-2)
    return split.reshape(*packed.shape[:-1], -1, group)


def _bits(packed: jax.Array) -> jax.Array:
    """The bits of bytes [..., n] from the lowest on, [..., n, 8]."""
    shifts = jax.lax.expand_dims(jnp.arange(8, dtype=jnp.uint8), range(packed.ndim))
    return packed[..., None] >> shifts & 1


def _q4_0(parts: Parts) -> jax.Array:
    weights = _nibbles(parts["quants"], 16).astype(jnp.float32) - 8
    return weights * _halves(parts["scale"])[..., None]


def _q4_1(parts: Parts) -> jax.Array:
    weights = _nibbles(parts["quants"], 16).astype(jnp.float32)
    return weights * _halves(parts["scale"])[..., None] + _halves(parts["minimum"])[..., None]


def _q5(parts: Parts) -> jax.Array:
    """0 to 31, [..., N, B, 2, 16]."""
    nibbles = _nibbles(parts["quants"], 16)
    return (nibbles | _bits(parts["high"]).reshape(nibbles.shape) << 4).astype(jnp.float32)


def _q5_0(parts: Parts) -> jax.Array:
    return (_q5(parts) - 16) * _halves(parts["scale"])[..., None]


def _q5_1(parts: Parts) -> jax.Array:
    weights = _q5(parts)
    return weights * _halves(parts["scale"])[..., None] + _halves(parts["minimum"])[..., None]


def _q8_0(parts: Parts) -> jax.Array:
    return (parts["quants"].astype(jnp.float32) * _halves(parts["scale"]))[..., None, :]


def _q4_k(parts: Parts) -> jax.Array:
    return _scaled(_nibbles(parts["quants"], 32), parts)


def _q5_k(parts: Parts) -> jax.Array:
    bits = jnp.swapaxes(_bits(parts["high"]), -1, -2)  # one of each of 8 groups in a byte
    return _scaled(_nibbles(parts["quants"], 32) | bits << 4, parts)


def _scaled(quants: jax.Array, parts: Parts) -> jax.Array:
    """Of 8 groups of 32: the 6-bit scales and minima of each lie in pairs."""
    low, high = parts["pairs"][..., 8:], parts["pairs"][..., :8]
    nibbles = jnp.concatenate([low & 15, low >> 4], axis=-1)  # of 4 scales, then of 4 minima
    first, last = high & 63, nibbles | (high >> 2) & 48
    scales = jnp.concatenate([first[..., :4], last[..., :4]], axis=-1).astype(jnp.float32)
    minima = jnp.concatenate([first[..., 4:], last[..., 4:]], axis=-1).astype(jnp.float32)
    scales, minima = _halves(parts["scale"]) * scales, _halves(parts["minimum"]) * minima
    return quants.astype(jnp.float32) * scales[..., None] - minima[..., None]


def _q6_k(parts: Parts) -> jax.Array:
    low, high = _nibbles(parts["low"], 64), parts["high"]
    shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]
    halves = high.reshape(*high.shape[:-1], 2, 1, 32)
    shifts = jax.lax.expand_dims(shifts, range(halves.ndim - 2))
    pairs = (halves >> shifts & 3).reshape(*high.shape[:-1], 16, 16)
    weights = (low.reshape(pairs.shape) | pairs << 4).astype(jnp.float32) - 32
    scales = _halves(parts["scale"]) * parts["scales"].astype(jnp.float32)
    return weights * scales[..., None]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A block's parts in the order of its bytes, and how they become weights."""

    parts: Mapping[str, tuple[int, Any]]  # name -> (bytes in a block, dtype)
    unpack: Callable[[Parts], jax.Array]  # -> fp32 [..., N, B, groups, weights of a group]


_SCALE = {"scale": (2, np.uint16)}
_MINIMUM = _SCALE | {"minimum": (2, np.uint16)}
_PAIRS = _MINIMUM | {"pairs": (12, np.uint8)}
_HALF_BYTES = {"quants": (16, np.uint8)}
_FIFTHS = {"high": (4, np.uint8)} | _HALF_BYTES
# Where each bit lies is told beside the same types in `gguf_dequantize`.
LAYOUTS = {
    "Q4_0": Layout(parts=_SCALE | _HALF_BYTES, unpack=_q4_0),
    "Q4_1": Layout(parts=_MINIMUM | _HALF_BYTES, unpack=_q4_1),
    "Q5_0": Layout(parts=_SCALE | _FIFTHS, unpack=_q5_0),
    "Q5_1": Layout(parts=_MINIMUM | _FIFTHS, unpack=_q5_1),
    "Q8_0": Layout(parts=_SCALE | {"quants": (32, np.int8)}, unpack=_q8_0),
    "Q4_K": Layout(parts=_PAIRS | {"quants": (128, np.uint8)}, unpack=_q4_k),
    "Q5_K": Layout(
        parts=_PAIRS | {"high": (32, np.uint8), "quants": (128, np.uint8)}, unpack=_q5_k
    ),
    "Q6_K": Layout(
        parts={
            "low": (128, np.uint8),
            "high": (64, np.uint8),
            "scales": (16, np.int8),
            **_SCALE,
        },
        unpack=_q6_k,
    ),
}
