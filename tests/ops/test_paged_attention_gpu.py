"""Attention over pages as GPUs do it, on the CPU: the kernel interpreted, and lowered for CUDA."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import paged_attention as plain
from jaxdist.ops import paged_attention_gpu as gpu
from jaxdist.ops.paged_attention import Pages, Rows

SLOW = pytest.mark.slow


def heads_first(pages: Pages) -> Pages:
    return Pages(*(jnp.moveaxis(pool, 2, 0) for pool in pages))


def case(queries: int, dtype=jnp.bfloat16, value_width: int = 16) -> tuple[jax.Array, Pages, Rows]:
    """Rows at a page's end, in the middle and at the start, and one of padding; null pages hold
    what must not be seen."""
    rng = np.random.default_rng(queries)
    pools = (rng.normal(size=(60, 4, 2, width)) for width in (16, value_width))
    pages = Pages(*(jnp.asarray(pool, dtype).at[0].set(100) for pool in pools))
    tables = np.zeros((4, 24), np.int32)
    ids = iter(rng.permutation(np.arange(1, 60)).tolist())
    positions = np.array([75, 26, 0, 0])
    for row, position in enumerate(positions[:3]):
        count = -(-(position + queries) // 4)
        tables[row, :count] = [next(ids) for _ in range(count)]
    counts = np.array([queries, queries, queries, 0])
    rows = Rows(*map(jnp.asarray, (positions, counts, tables)))
    q_BTNH = jnp.asarray(rng.normal(size=(4, queries, 6, 16)), dtype)
    return q_BTNH, pages, rows


def both_ways(q_BTNH, pages: Pages, rows: Rows, **options) -> tuple[jax.Array, jax.Array]:
    """As GPUs do it, and the plain way."""
    fast, slow = (
        jax.jit(partial(attend, **options))
        for attend in (gpu.paged_attention, plain.reference_paged_attention)
    )
    return fast(q_BTNH, heads_first(pages), rows), slow(q_BTNH, pages, rows)


@pytest.mark.parametrize(
    ("queries", "softcap"),
    [(3, 2.0), pytest.param(1, None, marks=SLOW), pytest.param(17, None, marks=SLOW)],
)
def test_the_kernel_equals_the_plain_way(queries, softcap, monkeypatch):
    interpreted = partial(gpu.kernel_attention, interpret=True)
    monkeypatch.setattr(gpu, "kernel_attention", interpreted)
    fast, slow = both_ways(*case(queries), dtype=jnp.bfloat16, softcap=softcap, scale=0.5)
    assert fast.dtype == jnp.bfloat16
    # Of numbers near 1, that the kernel rounds three times.
    np.testing.assert_allclose(*(np.float32(a[:3]) for a in (fast, slow)), atol=0.03)
    assert not np.asarray(fast[3]).any()


@pytest.mark.parametrize(
    ("scores", "value_width"),
    [
        ({}, 16),
        pytest.param({"sliding_window": 6}, 16, marks=SLOW),
        ({"sliding_window": 6, "is_local": True, "softcap": 3.0}, 10),
        pytest.param({"sliding_window": 6, "is_local": False, "scale": 0.3}, 16, marks=SLOW),
        ({"sliding_window": 6, "is_local": jnp.array(True)}, 16),
        pytest.param({"sliding_window": 6, "is_local": jnp.array(False)}, 16, marks=SLOW),
        pytest.param({"sliding_window": 96}, 16, marks=SLOW),
    ],
)
@pytest.mark.parametrize("queries", [5, pytest.param(1, marks=SLOW)])
def test_what_is_gathered_equals_the_plain_way(queries, scores, value_width, monkeypatch):
    monkeypatch.setattr(gpu, "WIDTHS", (8, 21))  # of which the longest row needs the second
    fast, slow = both_ways(*case(queries, jnp.float32, value_width), dtype=jnp.float32, **scores)
    np.testing.assert_allclose(fast, slow, atol=1e-6)


@pytest.mark.parametrize("window", [6, pytest.param(None, marks=SLOW)])
def test_prompts_in_16_bits_equal_the_plain_way(window):
    fast, slow = both_ways(*case(20), dtype=jnp.bfloat16, sliding_window=window)
    np.testing.assert_allclose(*(np.float32(a[:3]) for a in (fast, slow)), atol=0.02)


def test_pages_are_written_as_on_the_cpu():
    _, pages, rows = case(5, jnp.float32)
    new = jnp.arange(4 * 5 * 2 * 16, dtype=jnp.float32).reshape(4, 5, 2, 16).at[0, 1].set(jnp.nan)
    rows = rows._replace(counts=jnp.array([5, 3, 1, 0]))
    found = gpu.write_pages(heads_first(pages), new, -new, rows, dtype=jnp.float32)
    expected = plain.write_pages(pages, new, -new, rows, dtype=jnp.float32)
    for one, other in zip(found, heads_first(expected), strict=True):
        np.testing.assert_array_equal(one[:, 1:], other[:, 1:])  # page 0 is anyone's


@pytest.mark.parametrize(("dtype", "runs"), [(jnp.bfloat16, True), (jnp.float32, False)])
def test_decoding_is_lowered_to_the_kernel(dtype, runs):
    q_BTNH, pages, rows = case(1, dtype)
    attend = jax.jit(partial(gpu.paged_attention, dtype=dtype))
    lowered = attend.trace(q_BTNH, heads_first(pages), rows).lower(lowering_platforms=("cuda",))
    assert ("xla.gpu.triton" in lowered.as_text()) == runs
