import gguf
import numpy as np
import pytest

from jaxdist.config.errors import UsageError
from jaxdist.quantization.gguf_dequantize import dequantize
from jaxdist.quantization.gguf_quantize import CHUNK, KERNELS, quantize
from jaxdist.quantization.gguf_types import BY_NAME


def weights(rows: int = 11, columns: int = 96) -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    values[0] = 0  # a block without a scale
    values[1, :32] = np.arange(32) / 2  # ties
    values[2, :32] = -(2.0 ** -np.arange(32.0))
    return values


@pytest.mark.parametrize("name", KERNELS)
def test_bits_equal_the_packages(name: str):
    ours = quantize(weights(), BY_NAME[name], "w")
    theirs = gguf.quantize(weights(), gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(ours, theirs.view(np.uint8).reshape(ours.shape))


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_numbers_of_the_type_survive(name: str):
    exact = quantize(weights(), BY_NAME[name], "w")
    again = quantize(dequantize(exact, BY_NAME[name], "w"), BY_NAME[name], "w")
    np.testing.assert_array_equal(exact, again)


@pytest.mark.parametrize(("name", "steps"), [("Q8_0", 127), ("Q4_0", 8)])
def test_error_is_within_half_a_step(name: str, steps: int):
    values = weights()
    back = dequantize(quantize(values, BY_NAME[name], "w"), BY_NAME[name], "w")
    blocks, error = values.reshape(-1, 32), np.abs(back - values).reshape(-1, 32)
    step = np.abs(blocks).max(axis=1, keepdims=True) / steps
    # Q4_0 reaches from -8 to 7: the far end of the other sign is off by a whole step.
    bound = step * (0.51 if name == "Q8_0" else 1.01) + 1e-3 * np.abs(blocks)
    assert (error <= bound).all()


def test_chunks_do_not_show():
    values = np.random.default_rng(1).standard_normal((3, CHUNK)).astype(np.float32)
    whole = quantize(values, BY_NAME["Q8_0"], "w")
    np.testing.assert_array_equal(whole[2], quantize(values[2], BY_NAME["Q8_0"], "w"))


@pytest.mark.parametrize(
    ("name", "value"), [("F16", 1e6), ("Q8_0", np.nan), ("Q4_0", -np.inf), ("F32", np.nan)]
)
def test_weights_beyond_the_type_are_refused(name: str, value: float):
    values = weights()
    values[3, 40] = value
    with pytest.raises(UsageError, match=f"'blk.0.w' holds a weight that is not finite in {name}"):
        quantize(values, BY_NAME[name], "blk.0.w")
