"""The chunked cross entropy equals autodiff through log_softmax.

N tokens, V vocabulary rows, D hidden size.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.ops.cross_entropy import VocabularyShards, cross_entropy

N, V, D = 13, 32, 8
slow = partial(pytest.param, marks=pytest.mark.slow)


def numbers(num_rows=V, scale=1.0, num_tokens=N, masked=0.3):
    """x, head, labels, weights: uneven weights, some of them zero."""
    random = np.random.default_rng(0)
    x = random.standard_normal((num_tokens, D)) * scale
    head = random.standard_normal((V, D))
    labels = random.integers(0, num_rows, num_tokens)
    weights = random.random(num_tokens) * (random.random(num_tokens) >= masked)
    return (
        x.astype(np.float32),
        head.astype(np.float32),
        labels.astype(np.int32),
        weights.astype(np.float32),
    )


def twin(x, head, labels, weights, num_rows=V, softcap=None):
    """Loss and its gradients by x and head, by autodiff through all logits at once."""

    def loss(x, head):
        logits = jnp.matmul(x, head[:num_rows].T, precision=lax.Precision.HIGHEST)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
        return -(weights[:, None] * picked).sum()

    value_and_grad = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, gradients = value_and_grad(x, head)
    return value, *gradients


def ours(x, head, labels, weights, num_rows=V, compute_dtype=jnp.float32, **options):
    def run(x, head, labels, weights, dhead):
        return cross_entropy(
            *(x, head, labels, weights, num_rows),
            compute_dtype=compute_dtype,
            dhead_VD=dhead,
            **options,
        )

    zeros = np.zeros(head.shape, np.float32)
    return jax.jit(run)(x, head, labels, weights, zeros)


def assert_close(found, wanted, tolerance):
    """Within `tolerance` of each array's largest entry."""
    for a, b in zip(found, wanted, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 1e-30)


@pytest.mark.parametrize("chunk_size", (4, 512, *map(slow, (1, 13))))
def test_any_chunk_size_equals_log_softmax(chunk_size):
    """13 tokens: chunks that divide them, that do not, and that are larger."""
    arrays = numbers()
    assert_close(ours(*arrays, chunk_size=chunk_size), twin(*arrays), 2e-6)


@pytest.mark.parametrize("num_rows", (31, 2, slow(17)))
def test_padding_rows_get_no_probability_and_no_gradient(num_rows):
    arrays = numbers(num_rows)
    loss, dx, dhead = ours(*arrays, num_rows=num_rows)
    assert_close((loss, dx, dhead), twin(*arrays, num_rows=num_rows), 2e-6)
    assert not np.asarray(dhead)[num_rows:].any()
    # Whatever the padding holds.
    x, head, labels, weights = arrays
    other = np.where(np.arange(V)[:, None] < num_rows, head, np.float32(1e4))
    assert_close(ours(x, other, labels, weights, num_rows=num_rows)[:2], (loss, dx), 0)


def test_capped_logits():
    assert_close(ours(*numbers(), softcap=1.5), twin(*numbers(), softcap=1.5), 1e-6)


def test_labels_of_weight_zero_do_not_matter():
    x, head, labels, weights = numbers(num_rows=30)
    assert (weights == 0).any()
    want = ours(x, head, labels, weights, num_rows=30)
    for label in (V + 5, 31, -100):  # no row, a padding row, another framework's mark
        elsewhere = np.where(weights == 0, np.int32(label), labels)
        assert_close(ours(x, head, elsewhere, weights, num_rows=30), want, 0)


def test_all_masked_is_zero_and_finite():
    x, head, labels, weights = numbers()
    for array in ours(x, head, labels, weights * 0, compute_dtype=jnp.bfloat16):
        assert not np.asarray(array).any()


def test_the_gradient_of_the_head_is_added_to_what_is_given():
    arrays = numbers()
    start = np.ones((V, D), np.float32)
    run = partial(cross_entropy, num_rows=V, compute_dtype=jnp.float32)
    total = jax.jit(run)(*arrays, dhead_VD=start)[2]
    np.testing.assert_allclose(total, ours(*arrays)[2] + 1, rtol=1e-6)


def test_without_gradients():
    arrays = numbers()
    run = partial(cross_entropy, num_rows=V, compute_dtype=jnp.float32, chunk_size=4)
    loss, *none = jax.jit(run)(*arrays)
    assert none == [None, None]
    np.testing.assert_allclose(loss, twin(*arrays)[0], rtol=2e-6)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_16_bits_are_off_by_their_rounding_only(dtype):
    """Inputs that 16 bits hold exactly leave the rounding of the exponentials, eps / 2 each."""
    x, head, labels, weights = numbers(num_tokens=64)
    x, head = (a.astype(dtype).astype(np.float32) for a in (x, head))
    found = ours(x, head, labels, weights, compute_dtype=dtype)
    assert all(a.dtype == jnp.float32 for a in found)
    assert_close(found, twin(x, head, labels, weights), 4 * float(jnp.finfo(dtype).eps))


def test_fp16_holds_small_and_large_weights():
    """Weights of a loss scale over many tokens, and of the mean over many: beyond fp16's range."""
    x, head, labels, weights = numbers()
    x, head = (a.astype(np.float16).astype(np.float32) for a in (x, head))
    want = twin(x, head, labels, weights)
    for scale in (2.0**20, 2.0**-30):
        found = ours(x, head, labels, weights * np.float32(scale), compute_dtype=jnp.float16)
        assert_close([a / scale for a in found], want, 4 * float(jnp.finfo(jnp.float16).eps))


@pytest.mark.parametrize("scale", (1e5, slow(1e3)))
def test_extreme_logits(scale):
    """Logits beyond exp's range: probabilities of 0 and 1, and never a NaN."""
    arrays = numbers(scale=scale)
    found, want = ours(*arrays, chunk_size=4), twin(*arrays)
    assert all(np.isfinite(a).all() for a in found)
    assert_close(found, want, 1e-5)


@pytest.mark.parametrize("num_rows", (29, 5, slow(V)))
def test_a_sharded_vocabulary_is_the_same(num_rows):
    """Four members with 8 rows each; with 5 rows in all, three of them hold padding only."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("v",), axis_types=(AxisType.Auto,))
    x, head, labels, weights = numbers(num_rows)

    def member(x, head, labels, weights):
        first = lax.axis_index("v") * head.shape[0]
        loss, dx, dhead = cross_entropy(
            x,
            head,
            labels - first,
            weights,
            num_rows - first,
            compute_dtype=jnp.float32,
            shards=VocabularyShards(max=lambda x: lax.pmax(x, "v"), sum=lambda x: lax.psum(x, "v")),
            chunk_size=4,
            dhead_VD=jnp.zeros_like(head),
        )
        return loss, lax.psum(dx, "v"), dhead

    sharded = jax.shard_map(
        member,
        mesh=mesh,
        in_specs=(P(), P("v"), P(), P()),
        out_specs=(P(), P(), P("v")),
    )
    found = jax.jit(sharded)(x, head, labels, weights)
    assert_close(found, twin(x, head, labels, weights, num_rows), 2e-6)
