import gguf
import numpy as np
import pytest

from jaxdist.config.errors import UsageError
from jaxdist.quantization.gguf_dequantize import CHUNK, KERNELS, RARE, dequantize
from jaxdist.quantization.gguf_types import BLOCK_TYPES, BY_NAME


def random_rows(block_type, rows: int, blocks: int, seed: int = 0) -> np.ndarray:
    shape = (rows, blocks * block_type.num_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def test_types_are_those_of_ggml():
    sizes = {int(t): (t.name, *pair) for t, pair in gguf.GGML_QUANT_SIZES.items()}
    ours = {n: (t.name, t.block_size, t.num_bytes) for n, t in BLOCK_TYPES.items()}
    assert ours == sizes


@pytest.mark.parametrize("name", [n for n in (*KERNELS, *RARE) if n != "F64"])
def test_bits_equal_the_packages(name: str):
    block_type = BY_NAME[name]
    raw = random_rows(block_type, rows=37, blocks=3)
    with np.errstate(all="ignore"):  # random bits spell infinite scales too
        ours = dequantize(raw, block_type, "w")
        theirs = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    valid = ~np.isnan(theirs)
    assert valid.mean() > 0.5
    np.testing.assert_array_equal(np.isnan(ours), ~valid)
    np.testing.assert_array_equal(ours[valid].view(np.uint32), theirs[valid].view(np.uint32))


def test_f64_is_rounded_to_fp32():
    weights = np.random.default_rng(0).standard_normal((3, 5))
    raw = weights.view(np.uint8).reshape(3, -1)
    np.testing.assert_array_equal(dequantize(raw, BY_NAME["F64"], "w"), weights.astype(np.float32))


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "IQ4_XS"])
def test_chunks_do_not_show(name: str):
    block_type = BY_NAME[name]
    blocks = 2 * CHUNK // block_type.block_size + 5
    raw = random_rows(block_type, rows=1, blocks=blocks)
    with np.errstate(all="ignore"):
        whole = dequantize(raw, block_type, "w")
        last = dequantize(raw[:, -3 * block_type.num_bytes :], block_type, "w")
    np.testing.assert_array_equal(whole[:, -3 * block_type.block_size :], last)


def test_leading_dims_are_kept_and_input_is_not_written():
    block_type = BY_NAME["Q8_0"]
    raw = random_rows(block_type, rows=6, blocks=2).reshape(2, 3, -1)
    raw.flags.writeable = False
    with np.errstate(all="ignore"):
        assert dequantize(raw, block_type, "w").shape == (2, 3, 64)


@pytest.mark.parametrize("name", ["Q8_K", "I32", "Q1_0"])
def test_types_without_weights_are_named(name: str):
    block_type = BY_NAME[name]
    with pytest.raises(UsageError, match=f"tensor 'blk.3.ffn_up.weight' is of type {name}"):
        dequantize(random_rows(block_type, 1, 1), block_type, "blk.3.ffn_up.weight")
