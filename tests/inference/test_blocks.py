"""A runner whose weights lie in blocks serves what one with plain weights does."""

import numpy as np
import pytest

from jaxdist.inference import placement
from jaxdist.ops import linear
from tests.inference.small_host import Host, runner_of, serve

PROMPTS = ([3, 1, 4, 1, 5], list(range(1, 50)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1x1", "1x2x1"])
def test_blocks_change_no_token(mesh, model_of, monkeypatch):
    model = model_of(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )

    def served() -> tuple[list, set]:
        runner = runner_of(model, mesh, dtype="bfloat16")
        _, layers = runner._arrays
        weights = [layer.mlp.up_proj.weight[...] for layer in layers]
        texts = serve(Host(runner, np.random.default_rng(0)), PROMPTS, 5)
        return texts, {(w.ndim, w.dtype.name) for w in weights}  # with the dim of the stages

    monkeypatch.setattr(linear, "cpu_multiplies_bf16", lambda: False)
    texts, kinds = served()
    assert kinds == {(4, "uint16")}
    monkeypatch.setattr(placement, "fits_blocks", lambda *_: False)
    expected, kinds = served()
    assert kinds == {(3, "bfloat16")}
    assert texts == expected
