"""The kernels for TPUs, interpreted, equal the plain masked softmax; so do their gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import attention_tpu
from jaxdist.ops.attention import reference_attention
from jaxdist.ops.attention_tpu import kernel_attention, takes

SLOW = pytest.mark.slow
LENGTH = 384  # three blocks of 128
SCALE = 0.3


def _qkv(dtype=jnp.float32, kv_heads=2, width=32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, LENGTH, n, h) for n, h in ((4, 16), (kv_heads, 16), (kv_heads, width))]
    return tuple(jax.random.normal(k, s, dtype) * 2 for k, s in zip(keys, shapes, strict=True))


def _segments():
    starts = np.array([[0, 40, 128, 250], [0, 1, 200, 383]])
    return jnp.asarray((np.arange(LENGTH)[None, :, None] >= starts[:, None]).sum(-1), jnp.int32)


def _assert_equal(value_and_grads, args, tolerance, is_local=None, **kwargs):
    segments, window, softcap = (
        kwargs.get(name) for name in ("segment_ids", "sliding_window", "softcap")
    )

    def kernel(q, k, v, is_local):
        attention = partial(_kernel, segments, is_local, window, softcap)
        return value_and_grads(attention, q, k, v)

    fast = jax.jit(kernel)(*args, is_local)
    plain = partial(reference_attention, scale=SCALE, is_local=is_local, **kwargs)
    slow = jax.jit(partial(value_and_grads, plain))(*args)
    leaves = zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True)
    largest = max(float(jnp.abs(x.astype(jnp.float32)).max()) for x in jax.tree.leaves(slow))
    for got, expected in leaves:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        got, expected = np.asarray(got, np.float32), np.asarray(expected, np.float32)
        np.testing.assert_allclose(got, expected, rtol=0, atol=tolerance * largest)


def _kernel(segments, is_local, window, softcap, q, k, v):
    return kernel_attention(q, k, v, segments, is_local, window, SCALE, softcap)


@pytest.mark.parametrize(
    "window, packed, softcap",
    [
        (None, False, None),
        (100, True, 3.0),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [(None, True, None), (1, False, None), (200, True, None), (129, False, 3.0)]
        ),
    ],
)
def test_equals_the_plain_softmax(value_and_grads, window, packed, softcap):
    segments = _segments() if packed else None
    kwargs = dict(segment_ids=segments, sliding_window=window, softcap=softcap)
    _assert_equal(value_and_grads, _qkv(), 2e-6, **kwargs)


@SLOW
@pytest.mark.parametrize("is_local", [True, False])
def test_a_window_that_is_chosen_when_it_runs(value_and_grads, is_local):
    local = jnp.array(is_local)
    _assert_equal(value_and_grads, _qkv(), 2e-6, local, sliding_window=100)


@SLOW
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_grouped_heads_in_bf16(value_and_grads, kv_heads):
    """The twin rounds nothing but its inputs and results; half of bf16's step is 2^-9."""
    args = _qkv(jnp.bfloat16, kv_heads, 16)
    _assert_equal(value_and_grads, args, 2**-6, segment_ids=_segments())


@pytest.mark.parametrize("window", [None, 1, 127, 128, 129, 257, 1000])
def test_no_block_is_passed_over_that_a_query_sees(window):
    scores = attention_tpu._scores(8 * 128 + 128, window, 1.0, None)
    size, count = scores.size, scores.num_blocks
    distance = np.arange(count * size)[:, None] - np.arange(count * size)[None]
    seen = (distance >= 0) & (True if window is None else distance < window)
    blocks = seen.reshape(count, size, count, size).any(axis=(1, 3))
    meet = [[bool(scores.meet(i, j)) for j in range(count)] for i in range(count)]
    assert np.array_equal(blocks, meet)
    assert [int(scores.first(i)) for i in range(count)] == blocks.argmax(1).tolist()
    last = [int(np.flatnonzero(blocks[:, j])[-1]) for j in range(count)]
    assert [int(scores.last(j)) for j in range(count)] == last


def test_only_inputs_output_and_row_statistics_are_kept():
    q, k, v = _qkv(width=16)
    attention = partial(_kernel, None, None, None, None)
    _, vjp = jax.eval_shape(partial(jax.vjp, attention), q, k, v)
    kept = sorted(leaf.size for leaf in jax.tree.leaves(vjp))
    assert kept == sorted([q.size, k.size, v.size, q.size, q.size // q.shape[-1]])


@pytest.mark.parametrize(
    "length, width, fits", [(128, 16, True), (8192, 128, True), (130, 16, False), (128, 8, False)]
)
def test_takes_whole_blocks_of_whole_tiles(length, width, fits):
    q, v = (jax.ShapeDtypeStruct((1, length, 2, h), jnp.bfloat16) for h in (16, width))
    assert takes(q, v) == fits
