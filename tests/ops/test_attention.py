"""Blocked attention equals the plain masked softmax, alone and sharded over heads."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxdist.ops.attention import (
    attention_mask,
    causal_attention,
    masked_attention,
    reference_attention,
)

SLOW = pytest.mark.slow


def _qkv(heads=4, kv_heads=2, length=300, head_dim=8, dtype=jnp.float32, batch=2):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return tuple(jax.random.normal(k, s, dtype) * 2 for k, s in zip(keys, shapes, strict=True))


def _segments(length=300, batch=2):
    """Each row packs documents whose borders lie in and across the blocks."""
    starts = np.array([[0, 40, 128, 250], [0, 1, 200, 299]])[:batch]
    index = np.arange(length)
    return jnp.asarray((index[None, :, None] >= starts[:, None, :]).sum(-1), jnp.int32)


def _assert_close(got, expected, tolerance):
    """To `tolerance` of the largest value: some gradients are exactly zero."""
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    scale = max(float(jnp.abs(e.astype(jnp.float32)).max()) for e in expected)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype and g.shape == e.shape
        g, e = np.asarray(g, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(g, e, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize(
    "window, segments",
    [
        pytest.param(window, packed, id=f"{window}-{'packed' if packed else 'whole'}", marks=marks)
        for window, packed, marks in [
            *((None, False, ()), (1, True, ()), (100, True, ()), (200, True, ())),
            *((None, True, SLOW), (1, False, SLOW), (100, False, SLOW), (200, False, SLOW)),
        ]
    ],
)
def test_equals_the_plain_softmax(value_and_grads, segments, window):
    q, k, v = _qkv()
    kwargs = dict(segment_ids=_segments() if segments else None, sliding_window=window)
    fast = jax.jit(partial(value_and_grads, partial(causal_attention, **kwargs)))
    slow = jax.jit(partial(value_and_grads, partial(reference_attention, **kwargs)))
    _assert_close(fast(q, k, v), slow(q, k, v), 2e-6)


@pytest.mark.parametrize("is_local", [True, pytest.param(False, marks=SLOW)])
def test_caps_scales_and_a_window_that_is_chosen_when_it_runs(value_and_grads, is_local):
    q, k, v = _qkv()
    v = jnp.concatenate([v, v[..., :4] + 1], axis=-1)  # values wider than keys
    kwargs = dict(segment_ids=_segments(), sliding_window=100, scale=0.4, softcap=3.0)

    def chosen(q, k, v, is_local):
        attention = partial(causal_attention, is_local=is_local, **kwargs)
        return value_and_grads(attention, q, k, v)

    plain = partial(reference_attention, is_local=is_local, **kwargs)
    slow = jax.jit(partial(value_and_grads, plain))(q, k, v)
    _assert_close(jax.jit(chosen)(q, k, v, jnp.array(is_local)), slow, 2e-6)
    without = dict(kwargs, sliding_window=100 if is_local else None)
    _assert_close(reference_attention(q, k, v, **without), plain(q, k, v), 1e-7)


@pytest.mark.parametrize(
    "heads, kv_heads, length",
    [
        *((6, 2, 1), (4, 1, 128), (6, 2, 130)),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [(4, 4, 1), (4, 1, 1), (4, 4, 128), (6, 2, 128), (4, 4, 130), (4, 1, 130)]
        ),
    ],
)
def test_grouped_heads_and_lengths(value_and_grads, heads, kv_heads, length):
    args = _qkv(heads, kv_heads, length)
    fast = jax.jit(partial(value_and_grads, causal_attention))
    slow = jax.jit(partial(value_and_grads, reference_attention))
    _assert_close(fast(*args), slow(*args), 2e-6)


@SLOW
def test_long_rows_take_larger_blocks():
    args = _qkv(2, 1, 4200, 4, batch=1)
    fast = jax.jit(causal_attention)(*args)
    _assert_close(fast, jax.jit(reference_attention)(*args), 2e-6)


def test_scale():
    args = _qkv()
    fast = jax.jit(partial(causal_attention, scale=0.1))(*args)
    _assert_close(fast, jax.jit(partial(reference_attention, scale=0.1))(*args), 2e-6)


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=SLOW)])
def test_bf16_is_as_good_as_its_inputs(value_and_grads, native, monkeypatch):
    monkeypatch.setattr("jaxdist.ops.product.cpu_multiplies_bf16", lambda: native)
    args = _qkv(dtype=jnp.bfloat16)
    segments = _segments()
    fast = jax.jit(partial(value_and_grads, partial(causal_attention, segment_ids=segments)))
    slow = jax.jit(partial(value_and_grads, partial(reference_attention, segment_ids=segments)))
    # The twin rounds nothing but its inputs and results; half of bf16's step is 2^-9.
    _assert_close(fast(*args), slow(*args), 2**-6)


@pytest.mark.parametrize(
    "native, dtype",
    [
        (False, jnp.float32),
        *(pytest.param(native, jnp.bfloat16, marks=SLOW) for native in (False, True)),
        pytest.param(True, jnp.float32, marks=SLOW),
    ],
)
def test_heads_over_tp_need_no_collective(value_and_grads, sharded, native, dtype, monkeypatch):
    monkeypatch.setattr("jaxdist.ops.product.cpu_multiplies_bf16", lambda: native)
    args = (*_qkv(dtype=dtype), _segments())
    heads = P(None, None, "tp", None)
    result = sharded(
        lambda q, k, v, s: causal_attention(q, k, v, segment_ids=s, sliding_window=200),
        args,
        (heads, heads, heads, P()),
    )
    assert result.collectives == set()
    plain = jax.jit(
        partial(
            value_and_grads,
            lambda q, k, v, s: causal_attention(q, k, v, segment_ids=s, sliding_window=200),
        )
    )
    _assert_close(result.grads, plain(*args), 1e-6 if dtype == jnp.float32 else 2**-7)


def test_only_inputs_output_and_row_statistics_are_kept():
    q, k, v = _qkv(length=512)
    _, vjp = jax.eval_shape(partial(jax.vjp, causal_attention), q, k, v)
    kept = sorted(leaf.size for leaf in jax.tree.leaves(vjp))
    assert kept == sorted([q.size, k.size, v.size, q.size, q.size // q.shape[-1]])


def test_decoding_one_token_against_a_cache_equals_the_last_row():
    q, k, v = _qkv(length=20)
    whole = jax.jit(partial(reference_attention, sliding_window=7))(q, k, v)
    padded_k, padded_v = (jnp.pad(x, ((0, 0), (0, 4), (0, 0), (0, 0))) for x in (k, v))
    position = jnp.full((2, 1), 19)
    mask = attention_mask(position, jnp.arange(24)[None, :], sliding_window=7)
    last = jax.jit(masked_attention)(q[:, -1:], padded_k, padded_v, mask)
    _assert_close(last, whole[:, -1:], 1e-6)
