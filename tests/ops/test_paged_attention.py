"""Attention in chunks of pages equals the plain masked softmax over all of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.ops import paged_attention as module
from jaxdist.ops.paged_attention import (
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


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {"sliding_window": 6},
        {"sliding_window": 6, "is_local": False, "softcap": 3.0},
        {"sliding_window": 6, "is_local": jnp.array(True), "scale": 0.2},
    ],
)
@pytest.mark.parametrize("queries", [1, 5, 32])
def test_chunks_equal_the_plain_way(queries, scores, pages, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 16)
    rng = np.random.default_rng(1)
    tables = rng.permutation(np.arange(1, 60))[:54].reshape(2, 27)
    rows = Rows(jnp.array([70, 3]), jnp.array([queries, queries]), jnp.asarray(tables))
    q_BTNH = jnp.asarray(rng.normal(size=(2, queries, 4, 8)), jnp.float32)
    traced = {k: v for k, v in scores.items() if isinstance(v, jax.Array)}
    fixed = {k: v for k, v in scores.items() if k not in traced}
    fast, slow = (
        jax.jit(partial(attend, dtype=jnp.float32, **fixed))(q_BTNH, pages, rows, **traced)
        for attend in (paged_attention, reference_paged_attention)
    )
    np.testing.assert_allclose(fast, slow, atol=1e-6)


def test_padding_is_written_to_page_0_and_what_is_not_finite_as_0(pages):
    rows = Rows(jnp.array([3, 0]), jnp.array([2, 0]), jnp.array([[7, 9], [0, 0]]))
    new = jnp.ones((2, 3, 2, 8)).at[0, 1].set(jnp.nan)
    keys, _ = write_pages(pages, new, new[..., :6], rows, dtype=jnp.float32)
    expected = np.array(pages.keys)
    expected[7, 3], expected[9, 0] = 1, 0
    np.testing.assert_array_equal(keys[1:], expected[1:])
