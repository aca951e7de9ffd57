from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.interop.gguf.file import GGUFFile, open_gguf
from jaxdist.interop.gguf.packed import load_packed_parameters
from jaxdist.models import Transformer, default_context
from jaxdist.quantization.gguf_blocks import PackedWeight, dot_of_either

SLOW = pytest.mark.slow


def packed_logits(file: Any, tokens: np.ndarray) -> tuple[Transformer, np.ndarray]:
    like = jax.eval_shape(lambda: Transformer(file.config, key=jax.random.key(0)))
    model = load_packed_parameters(file, like)
    ctx = default_context(file.config)
    ctx = replace(ctx, dot=partial(dot_of_either, compute_dtype=jnp.float32))
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    forward = jax.jit(lambda model: model(jnp.asarray(tokens), positions, ctx=ctx))
    return model, np.asarray(forward(model))


@pytest.mark.parametrize("model", ["llama, biases, wide heads", pytest.param("phi3", marks=SLOW)])
def test_packed_model_equals_the_dequantized_one(model: str, small, tmp_path: Path):
    path = tmp_path / "m.gguf"
    small.write(path, model, "q4_0")
    tokens = np.random.default_rng(3).integers(0, 96, (2, 9))
    packed, ours = packed_logits(open_gguf(path), tokens)
    weight = packed.layers.mlp.up_proj.weight[...]
    assert isinstance(weight, PackedWeight) and weight.shape == (2, 64, 96)
    assert isinstance(packed.embed_tokens[...], jax.Array)
    plain = small.logits(open_gguf(path), tokens)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


def test_stacks_of_types_that_cannot_be_packed_are_dense(small, tmp_path: Path):
    path = tmp_path / "m.gguf"
    small.write(path, "qwen3", "q8_0", intermediate_size=72)  # down_proj becomes F16
    tokens = np.random.default_rng(3).integers(0, 96, (1, 5))
    packed, ours = packed_logits(open_gguf(path), tokens)
    mlp = packed.layers.mlp
    assert isinstance(mlp.down_proj.weight[...], jax.Array)
    assert isinstance(mlp.up_proj.weight[...], PackedWeight)
    plain = small.logits(open_gguf(path), tokens)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5 * np.abs(plain).max())


class Mixed:
    """Two files of one model whose layers are taken in turn, as in files of mixed types."""

    def __init__(self, *files: GGUFFile):
        self.files, self.config, self.tensor_names = files, files[0].config, files[0].tensor_names

    def _of(self, layer: int | None) -> GGUFFile:
        return self.files[(layer or 0) % len(self.files)]

    def load(self, name: str, layer: int | None = None) -> np.ndarray:
        return self._of(layer).load(name, layer)

    def packed_type(self, name: str, layer: int) -> str | None:
        return self._of(layer).packed_type(name, layer)

    def load_packed(self, name: str, layer: int) -> PackedWeight:
        return self._of(layer).load_packed(name, layer)


@pytest.mark.parametrize("types", [pytest.param(("q4_0", "q8_0"), marks=SLOW), ("q4_0", "f16")])
def test_layers_of_mixed_types_are_packed_one_by_one(types, small, tmp_path: Path):
    for gguf_type in types:
        small.write(tmp_path / f"{gguf_type}.gguf", "llama", gguf_type)
    file = Mixed(*(open_gguf(tmp_path / f"{gguf_type}.gguf") for gguf_type in types))
    tokens = np.random.default_rng(3).integers(0, 96, (1, 9))
    packed, ours = packed_logits(file, tokens)
    kinds = [type(layer) for layer in packed.layers.mlp.up_proj.weight.get_value().layers]
    assert kinds[0] is PackedWeight and (kinds[1] is PackedWeight) == (types[1] == "q8_0")
    plain = small.logits(file, tokens)
    np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-5 * np.abs(plain).max())
