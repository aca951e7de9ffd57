"""Weights kept in the blocks of a GGUF file, on the device, until they are multiplied.

Shapes: K inputs and N outputs of a product, B blocks along K, G groups of W weights in a block, T
tokens; leading dims (...) are layers or experts. A packed weight is stored as a plain one, [K, N],
with blocks in place of K: [..., B, part, N]. Files have it by outputs; here outputs come last, so
that neighbours are computed alike, at once. B and N are whole dims of every part, so either can be
sharded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdist.ops.dot import dot
from jaxdist.quantization.gguf_types import BY_NAME

Parts = Mapping[str, Any]  # arrays [..., B, part, N] by the names of `LAYOUTS`


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
        *leading, blocks, _, outputs = next(iter(self.parts.values())).shape
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
        part = np.ascontiguousarray(blocks[..., start : start + num_bytes]).view(dtype)
        parts[name] = np.ascontiguousarray(np.moveaxis(part, -3, -1))
        start += num_bytes
    return PackedWeight(parts=parts, type_name=type_name)


def unpack(packed: PackedWeight) -> jax.Array:
    """The fp32 weights, [..., K, N]."""
    weights = LAYOUTS[packed.type_name].unpack(packed.parts)
    return weights.reshape(*weights.shape[:-4], -1, weights.shape[-1])


def packed_dot(x: jax.Array, packed: PackedWeight, compute_dtype: DTypeLike) -> jax.Array:
    """x [..., K] times a packed [K, N] -> [..., N], as `ops.dot` of the dequantized weight."""
    return dot(x, unpack(packed), compute_dtype)


def dot_of_either(x: jax.Array, weight: Any, compute_dtype: DTypeLike) -> jax.Array:
    """`ops.dot`, or `packed_dot` of a packed weight: the `dot` of a Context."""
    if isinstance(weight, PackedWeight):
        return packed_dot(x, weight, compute_dtype)
    return dot(x, weight, compute_dtype)


def _halves(bits: jax.Array) -> jax.Array:
    """The numbers whose fp16 bits these are, in fp32."""
    return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)


def _fields(packed: jax.Array, width: int) -> jax.Array:
    """Of bytes [..., n, N] the fields of `width` bits, the lowest first, [..., 8 / width, n, N].

    By a shift for each field: put together of fields, they would be chosen one by one.
    """
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None, None]
    shifts = jax.lax.expand_dims(shifts, range(packed.ndim - 2))
    return jnp.expand_dims(packed, -3) >> shifts & (1 << width) - 1


def _nibbles(packed: jax.Array, group: int) -> jax.Array:
    """0 to 15, [..., G, group, N]: of each `group` bytes the low halves, then the high ones."""
    *leading, size, outputs = packed.shape
    groups = packed.reshape(*leading, size // group, group, outputs)
    return _fields(groups, 4).reshape(*leading, -1, group, outputs)


def _q4_0(parts: Parts) -> jax.Array:
    weights = _nibbles(parts["quants"], 16).astype(jnp.float32) - 8
    return weights * _halves(parts["scale"])[..., None, :]


def _q4_1(parts: Parts) -> jax.Array:
    weights = _nibbles(parts["quants"], 16).astype(jnp.float32)
    return weights * _halves(parts["scale"])[..., None, :] + _halves(parts["minimum"])[..., None, :]


def _q5(parts: Parts) -> jax.Array:
    """0 to 31, [..., B, 2, 16, N]."""
    nibbles = _nibbles(parts["quants"], 16)
    bits = jnp.swapaxes(_fields(parts["high"], 1), -2, -3)  # the bits of a byte in their order
    return (nibbles | bits.reshape(nibbles.shape) << 4).astype(jnp.float32)


def _q5_0(parts: Parts) -> jax.Array:
    return (_q5(parts) - 16) * _halves(parts["scale"])[..., None, :]


def _q5_1(parts: Parts) -> jax.Array:
    scale, minimum = (_halves(parts[name])[..., None, :] for name in ("scale", "minimum"))
    return _q5(parts) * scale + minimum


def _q8_0(parts: Parts) -> jax.Array:
    return (parts["quants"].astype(jnp.float32) * _halves(parts["scale"]))[..., None, :, :]


def _q4_k(parts: Parts) -> jax.Array:
    return _scaled(_nibbles(parts["quants"], 32), parts)


def _q5_k(parts: Parts) -> jax.Array:
    # Bit g of byte w is that of weight w in group g.
    return _scaled(_nibbles(parts["quants"], 32) | _fields(parts["high"], 1) << 4, parts)


def _scaled(quants: jax.Array, parts: Parts) -> jax.Array:
    """Of 8 groups of 32: the 6-bit scales and minima of each lie in pairs."""
    low, high = parts["pairs"][..., 8:, :], parts["pairs"][..., :8, :]
    nibbles = jnp.concatenate([low & 15, low >> 4], axis=-2)  # of 4 scales, then of 4 minima
    first, last = high & 63, nibbles | (high >> 2) & 48
    scales = jnp.concatenate([first[..., :4, :], last[..., :4, :]], axis=-2).astype(jnp.float32)
    minima = jnp.concatenate([first[..., 4:, :], last[..., 4:, :]], axis=-2).astype(jnp.float32)
    scales, minima = _halves(parts["scale"]) * scales, _halves(parts["minimum"]) * minima
    return quants.astype(jnp.float32) * scales[..., None, :] - minima[..., None, :]


def _q6_k(parts: Parts) -> jax.Array:
    low, high = _nibbles(parts["low"], 64), parts["high"]
    *leading, _, _, outputs = low.shape
    halves = high.reshape(*leading, 2, 32, outputs)
    pairs = _fields(halves, 2).reshape(*leading, 16, 16, outputs)
    weights = (low.reshape(pairs.shape) | pairs << 4).astype(jnp.float32) - 32
    scales = _halves(parts["scale"]) * parts["scales"].astype(jnp.float32)
    return weights * scales[..., None, :]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A block's parts in the order of its bytes, and how they become weights."""

    parts: Mapping[str, tuple[int, Any]]  # name -> (bytes in a block, dtype)
    unpack: Callable[[Parts], jax.Array]  # -> fp32 [..., B, G, W, N]


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
