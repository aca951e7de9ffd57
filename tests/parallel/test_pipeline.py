"""The pipeline equals the plain model on one device: loss, gradient norm and every gradient."""

from functools import partial
from itertools import product

import jax.numpy as jnp
import numpy as np
import pytest

slow = partial(pytest.param, marks=pytest.mark.slow)
MESHES = ("8x1x1", "1x8x1", "1x1x8", "2x2x2", "4x2x1", "2x1x4", "1x2x4", "1x1x1")

# Each parallel axis alone and with the others; each ZeRO stage, schedule and remat; heads that are
# repeated; a tied head; bubbles skipped and not.
REPRESENTATIVE = [
    slow("1x1x1", dict(zero=0, num_microbatches=1)),
    ("2x2x2", dict(zero=1, num_microbatches=7)),
    slow("4x2x1", dict(zero=2, schedule="gpipe", remat="dots")),
    slow("2x1x4", dict(zero=3, sequence_parallel=True, model=dict(num_key_value_heads=2))),
    slow(
        "1x4x2",
        dict(
            skip_bubbles=False, remat="full", model=dict(tie_word_embeddings=True, sliding_window=3)
        ),
    ),
]


@pytest.mark.parametrize("mesh, options", REPRESENTATIVE)
def test_equals_one_device(make_case, mesh, options):
    make_case(mesh, **options).assert_agrees()


@pytest.mark.slow
@pytest.mark.parametrize("count", (1, 4, 7))
@pytest.mark.parametrize("schedule", ("1f1b", "gpipe"))
@pytest.mark.parametrize("zero", (0, 1, 2, 3))
@pytest.mark.parametrize("mesh", MESHES)
def test_equals_one_device_on_every_mesh(make_case, mesh, zero, schedule, count):
    make_case(mesh, zero=zero, schedule=schedule, num_microbatches=count).assert_agrees()


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, zero",
    product(MESHES, (0, 3)),
)
def test_loss_alone_equals_one_device(make_case, mesh, zero):
    case = make_case(mesh, zero=zero)
    np.testing.assert_allclose(case.loss(), case.plain()[0], rtol=1e-5)


MODELS = {
    "grouped": dict(num_key_value_heads=2),
    "one kv head": dict(num_key_value_heads=1),
    "tied": dict(tie_word_embeddings=True),
    "window": dict(sliding_window=3),
    "gpt": dict(
        norm="layernorm", mlp="gelu", qkv_bias=True, attention_output_bias=True, mlp_bias=True
    ),
    "qwen3": dict(qk_norm=True, num_key_value_heads=4, tie_word_embeddings=True),
    "few tokens": dict(vocab_size=5),  # whole shards of nothing but padding
}


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", (False, True))
@pytest.mark.parametrize("mesh", ("2x2x2", "2x1x4"))
@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_model(make_case, model, mesh, sequence_parallel):
    options = dict(zero=3, num_microbatches=2, sequence_parallel=sequence_parallel)
    make_case(mesh, model=MODELS[model], **options).assert_agrees()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ("1x1x1", "2x2x2"))
@pytest.mark.parametrize("remat", ("full", "dots", "attn_out", "qkv,mlp_hidden"))
def test_recomputing_changes_nothing(make_case, mesh, remat):
    make_case(mesh, remat=remat).assert_agrees()


@pytest.mark.slow
def test_what_is_not_kept_is_computed_again_once(make_case):
    """Products in the compiled program, in which the loop over layers stands once."""
    products = {
        remat: make_case("1x1x1", num_microbatches=1, remat=remat).compiled.as_text().count(" dot(")
        for remat in ("none", "dots", "full")
    }
    # q, k, v, o, gate and up; the down projection's output is not needed by its own backward.
    assert products["full"] - products["dots"] == 6
    assert products["dots"] - products["none"] == 1  # the scores of attention


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ("1f1b", "gpipe"))
@pytest.mark.parametrize("mesh", ("2x2x2", "1x4x2"))
def test_computing_in_the_bubbles_changes_nothing(make_case, mesh, schedule):
    make_case(mesh, zero=2, schedule=schedule, skip_bubbles=False).assert_agrees()


# A 16-bit number is off by eps/2 at most, and a gradient has passed through some tens of them
# (4 layers, forward and backward), whose errors add up like a random walk.
@pytest.mark.parametrize(
    "dtype, scale, mesh",
    [
        pytest.param("bfloat16", 1.0, "2x2x2", marks=pytest.mark.slow),
        pytest.param("float16", 2.0**10, "2x2x2", marks=pytest.mark.slow),
        pytest.param("bfloat16", 1.0, "2x1x4", marks=pytest.mark.slow),
        pytest.param("float16", 2.0**10, "1x4x1", marks=pytest.mark.slow),
    ],
)
def test_16_bits_agree_within_their_rounding(make_case, dtype, scale, mesh):
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    make_case(mesh, dtype=dtype, scale=scale).assert_agrees(tolerance)
