"""Layers multiplied where they lie in their stack equal products with the dequantized weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops.dot import dot
from jaxdist.ops.linear import DEPTH
from jaxdist.quantization.gguf_blocks import LAYOUTS, PackedWeight, pack
from jaxdist.quantization.gguf_dequantize import dequantize
from jaxdist.quantization.gguf_types import BY_NAME
from jaxdist.quantization.packed_layers import FEW, in_lanes, kept_dot, layer_of, mixed
from tests.quantization.test_gguf_blocks import random_rows

OUTPUTS = 128  # two times LANES
kept = jax.jit(kept_dot, static_argnums=2)
plain = jax.jit(dot, static_argnums=2)


def rows_of(name: str, *leading: int, seed: int = 0) -> np.ndarray:
    """Stored rows of more inputs than are made into numbers at once."""
    return random_rows(name, *leading, blocks=DEPTH // BY_NAME[name].block_size + 2, seed=seed)


def check(x, weight, expected) -> None:
    wanted = plain(x, jnp.asarray(expected), jnp.float32)
    ours = kept(x, weight, jnp.float32)
    scale = float((jnp.abs(x) @ jnp.abs(jnp.asarray(expected))).max())  # of what is summed
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize(
    "name",
    # Of legacy blocks and of superblocks one each.
    [pytest.param(n, marks=() if n in ("Q8_0", "Q4_K") else pytest.mark.slow) for n in LAYOUTS],
)
def test_columns_are_taken_a_few_at_a_time(name: str):
    raw = rows_of(name, 2, OUTPUTS)
    stack = in_lanes(jax.tree.map(jnp.asarray, pack(raw, name)))
    assert {part.shape[:2] for part in stack.parts.values()} == {(2, 2)}
    expected = dequantize(raw[1], BY_NAME[name], "w").T
    for rows in (3, FEW + 1):
        x = jax.random.normal(jax.random.key(0), (1, rows, len(expected)))
        check(x, layer_of(stack, 1), expected)


def test_each_layer_may_be_stored_in_its_own_way():
    """Also dense, in 16 bits, and where lanes do not divide the outputs."""
    for outputs in (OUTPUTS, 96):
        inputs = (DEPTH // 32 + 2) * 32
        layers, expected = [], []
        for name in ("Q4_1", "", "Q8_0", "Q4_1"):
            if name:
                raw = rows_of(name, outputs, seed=len(layers))
                layers.append(jax.tree.map(jnp.asarray, pack(raw, name)))
                expected.append(dequantize(raw, BY_NAME[name], "w").T)
            else:
                values = jax.random.normal(jax.random.key(1), (inputs, outputs))
                layers.append(values)
                expected.append(values)
        stacks = mixed(layers, lanes=True)
        assert len(stacks.stacks) == 3
        assert sum(isinstance(stack, PackedWeight) for stack in stacks.stacks) == 2
        x = jax.random.normal(jax.random.key(0), (2, inputs))
        for number, weight in enumerate(expected):
            check(x, layer_of(stacks, jnp.int32(number)), weight)
