from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxdist.ops.dot import dot
from jaxdist.quantization.gguf_blocks import LAYOUTS, PackedWeight, pack, packed_dot
from jaxdist.quantization.gguf_blocks import unpack as unpack_eagerly
from jaxdist.quantization.gguf_dequantize import dequantize
from jaxdist.quantization.gguf_types import BY_NAME

unpack = jax.jit(unpack_eagerly)
SLOW = pytest.mark.slow
DTYPES = (jnp.float32, jnp.bfloat16)
EPSILON = {jnp.float32: 1e-6, jnp.bfloat16: 8e-3}


def random_rows(name: str, *leading: int, blocks: int = 2, seed: int = 0) -> np.ndarray:
    """Stored rows with finite scales: bytes below 64 are fp16 below 1."""
    shape = (*leading, blocks * BY_NAME[name].num_bytes)
    return np.random.default_rng(seed).integers(0, 60, shape, np.uint8)


def any_rows(name: str) -> np.ndarray:
    """Stored rows of any bits whose weights are finite."""
    shape = (400, BY_NAME[name].num_bytes)
    raw = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    with np.errstate(all="ignore"):
        finite = np.isfinite(dequantize(raw, BY_NAME[name], "w")).all(axis=1)
    return raw[finite]


@pytest.mark.parametrize("name", LAYOUTS)
def test_unpack_equals_dequantize(name: str):
    raw = any_rows(name)
    assert len(raw) > 300
    packed = pack(raw, name)
    plain = dequantize(raw, BY_NAME[name], "w")
    assert packed.shape == plain.T.shape
    np.testing.assert_array_equal(unpack(packed), plain.T)
    held = sum(part.nbytes for part in packed.parts.values())
    assert held == raw.nbytes


@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(name, dtype, marks=SLOW if dtype != jnp.float32 and name != "Q4_K" else ())
        for name, dtype in product(LAYOUTS, DTYPES)
    ],
)
def test_packed_dot_equals_dot_with_the_dequantized_weight(name: str, dtype):
    raw = random_rows(name, 48)
    weight = jnp.asarray(dequantize(raw, BY_NAME[name], "w").T)
    x = jax.random.normal(jax.random.key(0), (2, 3, weight.shape[0]), dtype)
    ours = jax.jit(packed_dot, static_argnums=2)(x, pack(raw, name), dtype)
    plain = jax.jit(dot, static_argnums=2)(x, weight, dtype)
    assert ours.shape == (2, 3, 48) and ours.dtype == dtype
    scale = float(jnp.abs(plain.astype(jnp.float32)).max())
    np.testing.assert_allclose(
        ours.astype(jnp.float32), plain.astype(jnp.float32), rtol=0, atol=EPSILON[dtype] * scale
    )


def test_gradient_of_the_activation():
    raw = random_rows("Q4_1", 32)
    weight = jnp.asarray(dequantize(raw, BY_NAME["Q4_1"], "w").T)
    x = jax.random.normal(jax.random.key(0), (3, weight.shape[0]))
    packed = pack(raw, "Q4_1")
    ours = jax.jit(jax.grad(lambda x: packed_dot(x, packed, jnp.float32).sum()))(x)
    np.testing.assert_allclose(ours, jnp.broadcast_to(weight.sum(axis=1), x.shape), rtol=1e-5)


def test_a_stack_of_layers_is_scanned_inside_a_param():
    """As a Transformer holds it: an nnx.Param that a layer reads with `weight[...]`."""
    raw = random_rows("Q8_0", 4, 64)  # [L, N, bytes], K = N
    stack = nnx.Param(pack(raw, "Q8_0"), axes=("layers", "embed", "heads"))
    assert stack[...].shape == (4, 64, 64)

    def layer(x: jax.Array, weight: nnx.Param) -> tuple[jax.Array, None]:
        packed = weight[...]
        assert isinstance(packed, PackedWeight) and packed.shape == (64, 64)
        return packed_dot(x, packed, jnp.float32), None

    x = jax.random.normal(jax.random.key(0), (2, 64))
    out, _ = jax.jit(lambda x, stack: jax.lax.scan(layer, x, stack))(x, stack)
    expected = np.asarray(x, np.float64)
    for weights in dequantize(raw, BY_NAME["Q8_0"], "w"):
        expected = expected @ weights.T
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_array_equal(unpack(stack[2]), unpack(pack(raw[2], "Q8_0")))


@pytest.mark.parametrize("spec", [("tp",), (None, None, "tp")])
@pytest.mark.parametrize(
    ("name", "scales"), [pytest.param("Q4_1", (0, 2), marks=SLOW), ("Q6_K", (208,))]
)
def test_outputs_or_inputs_may_be_sharded(
    name: str, scales: tuple[int, ...], spec: tuple[str | None, ...]
):
    raw = random_rows(name, 32, blocks=4)
    blocks = raw.reshape(32, 4, -1)
    for place in scales:  # fp16 scales of one: whole numbers, whose sums are exact in any order
        blocks[..., place : place + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    packed = pack(raw, name)
    x = jnp.float32(jax.random.randint(jax.random.key(0), (2, packed.shape[0]), -2, 3))
    plain = jax.jit(packed_dot, static_argnums=2)(x, packed, jnp.float32)
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(packed, NamedSharding(mesh, PartitionSpec(*spec)))
    ours = jax.jit(packed_dot, static_argnums=2)(x, sharded, jnp.float32)
    np.testing.assert_array_equal(ours, plain)
    assert float(jnp.abs(plain).max()) > 100
