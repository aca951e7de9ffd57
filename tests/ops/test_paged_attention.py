"""Attention in chunks of pages equals the plain masked softmax over all of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange

from jaxdist.ops import paged_attention as module
from jaxdist.ops.paged_attention import (
    KeyPage,
    Pages,
    Rows,
    paged_attention,
    reference_paged_attention,
    write_pages,
)


@pytest.fixture
def pages() -> Pages:
    rng = np.random.default_rng(0)
    return Pages(
        *(jnp.asarray(rng.normal(size=(60, 4, 2, width)), jnp.float32) for width in (8, 6))
    )


def laid_out(pages: Pages, key_page: KeyPage) -> Pages:
    """`pages`, whose keys lie by token, with keys in another order."""
    return pages._replace(keys=jnp.asarray(rearrange(pages.keys, f"p c k h -> p {key_page}")))


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"sliding_window": 6},
        {"sliding_window": 6, "is_local": False, "softcap": 3.0},
        {"sliding_window": 6, "is_local": jnp.array(True), "scale": 0.2},
    ],
)
@pytest.mark.parametrize("key_page", ["c k h", "k h c"])
@pytest.mark.parametrize("queries", [1, 5, 32])
def test_chunks_equal_the_plain_way(queries, key_page, scores, pages, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    rng = np.random.default_rng(1)
    tables = rng.permutation(np.arange(1, 60))[:54].reshape(2, 27)
    rows = Rows(jnp.array([70, 3]), jnp.array([queries, queries]), jnp.asarray(tables))
    q_BTNH = jnp.asarray(rng.normal(size=(2, queries, 4, 8)), jnp.float32)
    traced = {k: v for k, v in scores.items() if isinstance(v, jax.Array)}
    fixed = {k: v for k, v in scores.items() if k not in traced}
    slow = jax.jit(partial(reference_paged_attention, dtype=jnp.float32, **fixed))(
        q_BTNH, pages, rows, **traced
    )
    fast = jax.jit(partial(paged_attention, dtype=jnp.float32, key_page=key_page, **fixed))(
        q_BTNH, laid_out(pages, key_page), rows, **traced
    )
    np.testing.assert_allclose(fast, slow, atol=1e-6)


@pytest.mark.parametrize("key_page", ["c k h", "k h c"])
def test_padding_is_written_to_page_0_and_what_is_not_finite_as_0(key_page, pages):
    rows = Rows(jnp.array([3, 0]), jnp.array([2, 0]), jnp.array([[7, 9], [0, 0]]))
    new = jnp.ones((2, 3, 2, 8)).at[0, 1].set(jnp.nan)
    found = write_pages(
        laid_out(pages, key_page), new, new[..., :6], rows, dtype=jnp.float32, key_page=key_page
    )
    expected = Pages(*map(np.array, pages))
    for pool in expected:
        pool[7, 3], pool[9, 0] = 1, 0
    for pool, right in zip(found, laid_out(expected, key_page), strict=True):
        np.testing.assert_array_equal(pool[1:], right[1:])
