"""The kernels for pages equal what XLA makes of the plain functions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxdist.ops import kernels
from jaxdist.ops import paged_attention as plain
from jaxdist.ops.paged_attention import Pages, Rows

if not kernels.available():
    pytest.skip(
        "no numba, or no AVX2: XLA's twins run, and are tested, instead", allow_module_level=True
    )

from jaxdist.ops.kernels import attend as paged_attention
from jaxdist.ops.kernels import paged_attention as module
from jaxdist.ops.kernels import write_pages

# Sequences that stand anywhere: at their start, within and at the end of a page, and padding.
POSITIONS = (70, 3, 0, 63, 0)


def some_pages(dtype: str, page_size: int, heads: int, widths: tuple[int, int]) -> Pages:
    rng = np.random.default_rng(0)
    count = 1 + len(POSITIONS) * -(-128 // page_size)
    keys = jnp.asarray(rng.normal(size=(count, heads, widths[0], page_size)), dtype)
    values = jnp.asarray(rng.normal(size=(count, page_size, heads, widths[1])), dtype)
    if dtype != "bfloat16":
        return Pages(keys, values)
    return Pages(*(lax.bitcast_convert_type(pool, jnp.uint16) for pool in (keys, values)))


def some_rows(queries: int, pages: Pages) -> Rows:
    count, page_size = pages.values.shape[:2]
    tables = 1 + np.random.default_rng(1).permutation(count - 1)
    counts = [queries, max(1, queries - 2), queries, queries, 0]
    tables = jnp.asarray(tables.reshape(len(POSITIONS), -1), jnp.int32)
    return Rows(jnp.asarray(POSITIONS, jnp.int32), jnp.asarray(counts, jnp.int32), tables)


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"sliding_window": 6},
        {"sliding_window": 6, "is_local": False, "softcap": 3.0},
        {"sliding_window": 6, "is_local": jnp.array(True), "scale": 0.2},
    ],
)
@pytest.mark.parametrize(("dtype", "lanes"), [("bfloat16", 16), ("float32", 8)])
@pytest.mark.parametrize(
    ("queries", "page_size", "group", "widths"),
    [(1, 16, 3, (64, 64)), (40, 16, 3, (8, 6)), (5, 4, 1, (24, 96)), (5, 48, 64, (8, 8))],
)
def test_attention_equals_the_plain_way(
    queries, page_size, group, widths, dtype, lanes, scores, monkeypatch
):
    monkeypatch.setattr(module, "vector_size", lambda: lanes)
    pages = some_pages(dtype, page_size, 2, widths)
    rows = some_rows(queries, pages)
    shape = (len(POSITIONS), queries, 2 * group, widths[0])
    q_BTNH = jnp.asarray(np.random.default_rng(2).normal(size=shape), jnp.float32)
    traced = {k: v for k, v in scores.items() if isinstance(v, jax.Array)}
    fixed = {k: v for k, v in scores.items() if k not in traced} | {"dtype": jnp.dtype(dtype)}
    expected = jax.jit(partial(plain.paged_attention, key_page="k h c", **fixed))(
        q_BTNH, pages, rows, **traced
    )
    found = jax.jit(partial(paged_attention, **fixed))(q_BTNH, pages, rows, **traced)
    for row, count in enumerate(rows.counts):
        np.testing.assert_allclose(found[row, :count], expected[row, :count], atol=2e-6)
        assert not found[row, count:].any()


def test_the_largest_scores_overflow_nothing():
    pages = some_pages("float32", 16, 2, (8, 8))
    rows = some_rows(3, pages)
    q_BTNH = 1e4 * jnp.asarray(np.random.default_rng(2).normal(size=(5, 3, 4, 8)), jnp.float32)
    expected = plain.paged_attention(q_BTNH, pages, rows, dtype="float32", key_page="k h c")
    found = paged_attention(q_BTNH, pages, rows, dtype="float32")
    np.testing.assert_allclose(
        found[:, 0], jnp.where(rows.counts[:, None, None] > 0, expected[:, 0], 0), atol=1e-3
    )


def test_a_query_is_the_same_among_any_number_of_queries():
    """Bit by bit: a prompt whose beginning is cached, or that is cut, is the same prompt."""
    pages = some_pages("bfloat16", 16, 2, (64, 64))
    rows = some_rows(40, pages)
    q_BTNH = jnp.asarray(np.random.default_rng(2).normal(size=(5, 40, 6, 64)), jnp.float32)
    whole = paged_attention(q_BTNH, pages, rows, dtype="bfloat16")
    for query in (0, 1, 17, 39):
        one = rows._replace(positions=rows.positions + query, counts=jnp.array([1, 1, 1, 1, 0]))
        alone = paged_attention(q_BTNH[:, query : query + 1], pages, one, dtype="bfloat16")
        for row, count in enumerate(rows.counts):
            if query < count:
                np.testing.assert_array_equal(alone[row, 0], whole[row, query])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("queries", [1, 40])
def test_pages_are_written_as_in_the_plain_way(queries, dtype):
    pages = some_pages(dtype, 16, 2, (8, 6))
    rows = some_rows(queries, pages)
    k_BTKH = jnp.asarray(np.random.default_rng(2).normal(size=(5, queries, 2, 8)), jnp.float32)
    k_BTKH = k_BTKH.at[0, 0, 0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
    new = k_BTKH, k_BTKH[..., :6]
    expected = plain.write_pages(pages, *new, rows, dtype=dtype, key_page="k h c")
    found = write_pages(pages, *new, rows, dtype=dtype)
    for pool, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(pool[1:], right[1:])  # page 0 belongs to nobody


def test_nothing_is_written_or_read_beyond_a_table():
    """A scheduler that erred would have a kernel write anywhere."""
    pages = some_pages("float32", 16, 2, (8, 8))
    rows = some_rows(1, pages)
    last = rows.tables.shape[1] * 16
    rows = rows._replace(positions=jnp.array([last, last + 5000, 0, 0, 0], jnp.int32))
    new = jnp.ones((5, 1, 2, 8))
    written = write_pages(pages, new, new, rows, dtype="float32")
    changed = np.flatnonzero((written.values != pages.values).any(axis=(1, 2, 3)))
    assert sorted(changed) == sorted(int(rows.tables[row, 0]) for row in (2, 3))
    assert not paged_attention(new, pages, rows, dtype="float32")[:2].any()


def test_pages_are_written_in_place():
    """In a loop over layers, whose pages lie in one pool, nothing as large as it is made."""
    pages = some_pages("bfloat16", 16, 2, (64, 64))
    rows = some_rows(1, pages)
    new = jnp.ones((5, 1, 2, 64))

    def layers(pages: Pages) -> Pages:
        def layer(number, pages: Pages) -> Pages:
            own = rows._replace(tables=rows.tables + number)
            pages = write_pages(pages, new, new, own, dtype="bfloat16")
            out_BTNH = paged_attention(new, pages, own, dtype="bfloat16")
            return pages._replace(values=pages.values + (out_BTNH.sum() > 1e9).astype(jnp.uint16))

        return lax.fori_loop(0, 3, layer, pages)

    compiled = jax.jit(layers, donate_argnums=0).lower(pages).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pages.keys.nbytes


def test_floats_without_a_kernel_take_the_plain_way():
    pages = Pages(*(pool.astype(jnp.uint16) for pool in some_pages("float32", 16, 2, (8, 8))))
    rows = some_rows(3, pages)
    new = jnp.ones((5, 3, 2, 8), jnp.float16)
    written = write_pages(pages, new, new, rows, dtype="float16")
    expected = plain.write_pages(pages, new, new, rows, dtype="float16", key_page="k h c")
    np.testing.assert_array_equal(written.keys, expected.keys)
    found = paged_attention(new, written, rows, dtype="float16")
    expected = plain.paged_attention(new, written, rows, dtype="float16", key_page="k h c")
    np.testing.assert_array_equal(found, expected)
