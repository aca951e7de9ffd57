"""Cross entropy made with its gradients equals autodiff through log_softmax."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxdist.ops.cross_entropy import VocabularyShards, cross_entropy

N, V, D = 24, 40, 16
ROWS = 37  # the last 3 rows are padding


def inputs(scale: float = 1.0) -> tuple[Any, Any, Any, Any]:
    random = np.random.default_rng(0)
    x = scale * random.normal(size=(N, D))
    labels = random.integers(0, ROWS, N)
    weights = random.random(N) * (random.random(N) < 0.7) / N
    head = random.normal(size=(V, D))
    return (
        jnp.asarray(x, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(labels, jnp.int32),
        jnp.asarray(weights, jnp.float32),
    )


def plain(x, head, labels, weights):
    """Loss and gradients by x and head, padding rows cut off before the softmax."""

    def loss(x, head):
        logits = jnp.matmul(x, head[:ROWS].T, precision=jax.lax.Precision.HIGHEST)
        scores = jax.nn.log_softmax(logits)
        return -(jnp.take_along_axis(scores, labels[:, None], axis=1)[:, 0] * weights).sum()

    return loss(x, head), *jax.grad(loss, (0, 1))(x, head)


def ours(x, head, labels, weights, dtype=jnp.float32, **options):
    return cross_entropy(
        x,
        head,
        labels,
        weights,
        ROWS,
        compute_dtype=dtype,
        dhead_VD=jnp.zeros_like(head),
        **options,
    )


def assert_close(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert np.abs(np.asarray(a) - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)


@pytest.mark.parametrize("chunk_size", [N, 8, 7, 1, 1000])
def test_equals_autodiff_for_every_chunk(chunk_size):
    assert_close(ours(*inputs(), chunk_size=chunk_size), plain(*inputs()), 1e-6)


def test_loss_alone_is_the_same_number():
    loss, dx, dhead = cross_entropy(*inputs(), ROWS, compute_dtype=jnp.float32, chunk_size=8)
    assert dx is None and dhead is None
    assert loss == pytest.approx(float(plain(*inputs())[0]), rel=1e-6)


def test_head_gradient_is_added_to_what_is_there():
    x, head, labels, weights = inputs()
    before = jnp.ones_like(head)
    *_, dhead = cross_entropy(
        x, head, labels, weights, ROWS, compute_dtype=jnp.float32, dhead_VD=before, chunk_size=8
    )
    np.testing.assert_allclose(dhead - before, plain(*inputs())[2], atol=1e-6)


def test_padding_rows_get_no_gradient():
    _, _, dhead = ours(*inputs())
    assert not np.any(dhead[ROWS:])


def test_tokens_without_weight_count_nothing():
    x, head, labels, weights = inputs()
    loss, dx, dhead = ours(x, head, labels, jnp.zeros_like(weights))
    assert loss == 0 and not np.any(dx) and not np.any(dhead)
    _, dx, _ = ours(x, head, labels, weights)
    assert not np.any(dx[np.asarray(weights) == 0])


def test_extreme_logits_stay_finite():
    got, want = ours(*inputs(scale=300.0)), plain(*inputs(scale=300.0))
    assert all(np.isfinite(np.asarray(a)).all() for a in got)
    assert_close(got, want, 1e-5)


# A product's operands are rounded to eps/2; sums of D or V of them err like a random walk.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_as_near_as_its_dtype(dtype):
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    assert_close(ours(*inputs(), dtype=dtype, chunk_size=8), plain(*inputs()), tolerance)


def test_fp16_gradients_of_a_huge_vocabulary_do_not_underflow():
    # One token of 4M: its weight over the sum of exponentials is below fp16's smallest number.
    x, head, labels, weights = inputs()
    tiny = weights * 2.0**-30
    got = ours(x, head, labels, tiny, dtype=jnp.float16)
    assert_close(got, plain(x, head, labels, tiny), 4 * float(jnp.finfo(jnp.float16).eps))


def test_a_sure_label_keeps_its_small_gradient():
    # softmax - onehot cancels; the exponentials are rounded before they are summed, so the
    # difference keeps the relative precision of bf16.
    x, head = jnp.eye(2, D) * 8, jnp.eye(V, D)
    labels, weights = jnp.arange(2, dtype=jnp.int32), jnp.ones(2)
    got = ours(x, head, labels, weights, dtype=jnp.bfloat16)
    assert_close(got, plain(x, head, labels, weights), 2.0**-7)


def test_shards_of_the_vocabulary_join():
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(AxisType.Auto,))
    x, head, labels, weights = inputs()

    def member(x, head, labels, weights):
        vary = lambda a: jax.lax.pcast(a, "tp", to="varying")  # noqa: E731
        first = jax.lax.axis_index("tp") * head.shape[0]
        loss, dx, dhead = cross_entropy(
            vary(x),
            head,
            vary(labels) - first,
            vary(weights),
            ROWS - first,
            compute_dtype=jnp.float32,
            shards=VocabularyShards(
                max=lambda a: vary(jax.lax.pmax(a, "tp")),
                sum=lambda a: vary(jax.lax.psum(a, "tp")),
            ),
            dhead_VD=jnp.zeros_like(head),
            chunk_size=8,
        )
        return jax.lax.pmean(loss, "tp"), jax.lax.psum(dx, "tp"), dhead

    specs = (P(), P("tp"), P(), P())
    sharded = jax.shard_map(member, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P("tp")))
    assert_close(jax.jit(sharded)(x, head, labels, weights), plain(*inputs()), 1e-6)
