"""GGUF blocks to fp32 on the host, in numpy, bit-equal to ggml's own arithmetic.

The types that files are full of are written here, so that each pass over the data stays in the
cache; the rare ones are left to the gguf package. Layouts are those of ggml's block structs:
little-endian, scales fp16; a byte of nibbles holds a weight of the first half of its group low
and one of the second half high.

Shapes: N blocks, the second dim the bytes or weights of a block.
"""

from collections.abc import Callable
from types import ModuleType

import numpy as np

from jaxdist.config.errors import UsageError
from jaxdist.quantization.gguf_types import BlockType

Kernel = Callable[[np.ndarray, np.ndarray], None]  # blocks [N, bytes] uint8, out [N, weights] fp32
CHUNK = 1 << 17  # weights; their fp32 fits in a core's cache


def dequantize(raw: np.ndarray, block_type: BlockType, name: str) -> np.ndarray:
    """fp32 weights [..., K] of stored rows [..., bytes of a row] uint8.

    `name` is the tensor's, for the UsageError about a type that holds no weights.
    """
    blocks = raw.reshape(-1, block_type.num_bytes)
    shape = (*raw.shape[:-1], raw.shape[-1] // block_type.num_bytes * block_type.block_size)
    kernel = KERNELS.get(block_type.name) or _of_package(block_type, name)
    out = np.empty((len(blocks), block_type.block_size), np.float32)
    step = max(1, CHUNK // block_type.block_size)
    for start in range(0, len(blocks), step):
        kernel(blocks[start : start + step], out[start : start + step])
    return out.reshape(shape)


def nibbles(packed: np.ndarray, group: int) -> np.ndarray:
    """Values 0 to 15 [N, weights] uint8 of bytes [N, weights / 2]: `group` low, `group` high."""
    pairs = packed.reshape(len(packed), -1, 1, group)
    out = np.empty((len(packed), pairs.shape[1], 2, group), np.uint8)
    np.bitwise_and(pairs[:, :, 0], 15, out=out[:, :, 0])
    np.right_shift(pairs[:, :, 0], 4, out=out[:, :, 1])
    return out.reshape(len(packed), -1)


def _halves(blocks: np.ndarray, start: int, count: int = 1) -> np.ndarray:
    """`count` fp16 numbers at byte `start` of each block, [N, count] fp32."""
    return blocks[:, start : start + 2 * count].copy().view("<f2").astype(np.float32)


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view("<f4")


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view("<f2")


def _f64(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks.view("<f8")


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(blocks.view("<u2"), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = nibbles(blocks[:, 2:], 16)
    out -= 8
    out *= _halves(blocks, 0)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    scale_and_min = _halves(blocks, 0, 2)
    out[:] = nibbles(blocks[:, 4:], 16)
    out *= scale_and_min[:, :1]
    out += scale_and_min[:, 1:]


def _fifth_bits(blocks: np.ndarray, start: int) -> np.ndarray:
    """The bits worth 16, one a weight, [N, 32] uint8."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks, 2)
    out -= 16
    out *= _halves(blocks, 0)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    scale_and_min = _halves(blocks, 0, 2)
    out[:] = nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks, 4)
    out *= scale_and_min[:, :1]
    out += scale_and_min[:, 1:]


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _halves(blocks, 0)


def six_bit_pairs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 8 scales and 8 minima of Q4_K and Q5_K, each [N, 8] uint8, of their 12 bytes [N, 12].

    Bytes 0-3 and 4-7 hold the first four of each in their low 6 bits; the other four have their
    low nibbles in bytes 8-11 and their top bits in the top bits of bytes 0-7.
    """
    scales, minima, low = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        np.concatenate([scales & 63, (low & 15) | ((scales >> 2) & 48)], axis=1),
        np.concatenate([minima & 63, (low >> 4) | ((minima >> 2) & 48)], axis=1),
    )


def _scale_groups(blocks: np.ndarray, out: np.ndarray) -> None:
    """Apply the super-block's scale and minimum to the integers in `out`, in groups of 32."""
    scales, minima = six_bit_pairs(blocks[:, 4:16])
    groups = out.reshape(len(out), 8, 32)
    groups *= (_halves(blocks, 0) * scales)[:, :, None]
    groups -= (_halves(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = nibbles(blocks[:, 16:], 32)
    _scale_groups(blocks, out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    # Bit g of byte j is the fifth bit of weight 32 g + j.
    shifts = np.arange(8, dtype=np.uint8)[None, :, None]
    fifth = (blocks[:, None, 16:48] >> shifts & 1) << 4
    out[:] = nibbles(blocks[:, 48:], 32) | fifth.reshape(len(out), 256)
    _scale_groups(blocks, out)


def six_bit_weights(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Values 0 to 63 [N, 256] uint8 of Q6_K's low nibbles [N, 128] and high pairs [N, 64].

    Each half of the block has 64 bytes of nibbles in the order of `nibbles(_, 64)` and 32 bytes
    whose pair s belongs to weight 32 s + j.
    """
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[None, None, :, None]
    pairs = (high.reshape(len(high), 2, 1, 32) >> shifts & 3) << 4
    return nibbles(low, 64) | pairs.reshape(len(low), 256)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    out[:] = six_bit_weights(blocks[:, :128], blocks[:, 128:192])
    out -= 32
    groups = out.reshape(len(out), 16, 16)
    groups *= (_halves(blocks, 208) * blocks[:, 192:208].view(np.int8))[:, :, None]


KERNELS: dict[str, Kernel] = {
    "F32": _f32,
    "F16": _f16,
    "F64": _f64,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
# Left to the package.
RARE = ("Q2_K", "Q3_K", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS")
RARE += ("IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS")


def _of_package(block_type: BlockType, name: str) -> Kernel:
    gguf = _package(block_type, name)

    def kernel(blocks: np.ndarray, out: np.ndarray) -> None:
        number = gguf.GGMLQuantizationType(block_type.number)
        # The package works on 16 rows at a time: long rows keep its calls few.
        rows = np.array_split(blocks, max(1, len(blocks) // 256))
        for row, place in zip(rows, np.array_split(out, len(rows)), strict=True):
            place[:] = gguf.dequantize(row.reshape(1, -1), number).reshape(place.shape)

    return kernel


def _package(block_type: BlockType, name: str) -> ModuleType:
    if block_type.name not in RARE:
        known = ", ".join((*KERNELS, *RARE))
        raise UsageError(
            f"tensor {name!r} is of type {block_type.name}, which holds no weights that can be "
            f"read; known: {known}"
        )
    try:
        import gguf
    except ImportError as error:
        raise UsageError(
            f"tensor {name!r} is of type {block_type.name}, which needs the package gguf: "
            "pip install gguf"
        ) from error
    return gguf
