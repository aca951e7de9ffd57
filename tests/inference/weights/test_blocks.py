"""A runner whose weights lie in blocks serves what one with plain weights does."""

import numpy as np
import pytest

from jaxdist.inference.weights import placement
from jaxdist.ops import kernels, product
from tests.inference.small_host import Host, runner_of, serve

PROMPTS = ([3, 1, 4, 1, 5], list(range(1, 50)))


@pytest.mark.slow
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("by_kernels", [True] * kernels.available() + [False])
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1", "1x1x2"])
def test_blocks_change_no_token(mesh, by_kernels, native, model_of, monkeypatch):
    model = model_of(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )

    def served() -> tuple[list, tuple[int, str]]:
        runner = runner_of(model, mesh, dtype="bfloat16")
        _, (stack,) = runner._arrays
        weight = stack.mlp.up_proj.weight[...]
        texts = serve(Host(runner, np.random.default_rng(0)), PROMPTS, 5)
        # With the dims of stages and layers.
        return texts, (weight.ndim, weight.dtype.name)

    monkeypatch.setattr(kernels, "available", lambda: by_kernels)
    monkeypatch.setattr(product, "cpu_multiplies_bf16", lambda: native)
    texts, kind = served()
    assert kind == (5, "uint32")
    monkeypatch.setattr(placement, "fits_blocks", lambda *_: False)
    expected, kind = served()
    assert kind == (4, "uint16")  # as bits all the same
    assert texts == expected
