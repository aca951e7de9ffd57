"""fp32 weights to GGUF blocks on the host, in numpy, bit-equal to ggml's reference quantizers.

Shapes: N blocks, the second dim the weights or bytes of a block.
"""

from collections.abc import Callable

import numpy as np

from jaxdist.config.errors import UsageError
from jaxdist.quantization.gguf_types import BlockType

CHUNK = 1 << 17  # weights; their fp32 fits in a core's cache


def quantize(weights: np.ndarray, block_type: BlockType, name: str) -> np.ndarray:
    """Stored rows [..., bytes of a row] uint8 of weights [..., K].

    K must be a multiple of the block. Raises UsageError, naming the tensor, where a weight is not
    finite in the stored type.
    """
    weights = np.ascontiguousarray(weights, np.float32)
    blocks = weights.reshape(-1, block_type.block_size)
    out = np.empty((len(blocks), block_type.num_bytes), np.uint8)
    kernel, finite = KERNELS[block_type.name], True
    step = max(1, CHUNK // block_type.block_size)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for start in range(0, len(blocks), step):
            scales = kernel(blocks[start : start + step], out[start : start + step])
            finite = finite and bool(np.isfinite(scales).all())
    if not finite:
        raise UsageError(
            f"tensor {name!r} holds a weight that is not finite in {block_type.name}; "
            "write f32 or bf16, and look for NaN in the weights"
        )
    return out.reshape(*weights.shape[:-1], -1)


def _f32(blocks: np.ndarray, out: np.ndarray) -> np.ndarray:
    out.view("<f4")[:] = blocks
    return blocks


def _f16(blocks: np.ndarray, out: np.ndarray) -> np.ndarray:
    out.view("<f2")[:] = blocks
    return out.view("<f2")


def _bf16(blocks: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even."""
    bits = blocks.view(np.uint32)
    bits = bits + (0x7FFF + (bits >> 16 & 1))
    out.view("<u2")[:] = bits >> 16
    return (bits & 0xFFFF0000).view(np.float32)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Scale max|w| / 127; round to nearest, ties away from zero."""
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    scaled = blocks * _reciprocal(scale)
    whole = np.trunc(scaled)
    whole += np.trunc(2 * (scaled - whole))
    out[:, 2:].view(np.int8)[:] = whole
    return _store_scale(scale, out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> np.ndarray:
    """The weight of largest magnitude becomes -8, with its sign in the scale."""
    largest = np.abs(blocks).argmax(axis=1)[:, None]
    scale = np.take_along_axis(blocks, largest, axis=1) / np.float32(-8)
    whole = np.clip(blocks * _reciprocal(scale) + np.float32(8.5), 0, 15).astype(np.uint8)
    np.bitwise_or(whole[:, :16], whole[:, 16:] << 4, out=out[:, 2:])
    return _store_scale(scale, out)


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _store_scale(scale: np.ndarray, out: np.ndarray) -> np.ndarray:
    halves = scale.astype("<f2")
    out[:, :2] = halves.view(np.uint8)
    return halves


# (blocks [N, weights] fp32, out [N, bytes] uint8) -> numbers that must be finite
KERNELS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
}
