"""The stream's order: each row once an epoch, other orders in other epochs, exact mixtures."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data.order import PERIOD, Order


def stretch(order: Order, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    return order.at(np.arange(start, start + count))


@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 10**9))
@settings(deadline=None)
def test_each_row_once_an_epoch(size: int, seed: int, epoch: int):
    groups, rows = stretch(Order([size], None, seed), epoch * size, size)
    assert not groups.any()
    np.testing.assert_array_equal(np.sort(rows), np.arange(size))


def test_large_epochs_are_whole_too():
    size = 1_000_003
    _, rows = stretch(Order([size], None, 1), 3 * size, size)
    np.testing.assert_array_equal(np.sort(rows), np.arange(size))


@given(st.lists(st.integers(0, 10**12), max_size=20), st.booleans())
@settings(deadline=None)
def test_a_position_does_not_depend_on_those_asked_with_it(positions: list[int], mixed: bool):
    order = Order([9, 100], [1.0, 2.0], 7) if mixed else Order([9], None, 7)
    together = np.stack(order.at(np.array(positions, np.int64)), 1)
    alone = [np.stack(order.at(np.array([p])), 1)[0] for p in positions]
    np.testing.assert_array_equal(together, np.array(alone, np.int64).reshape(-1, 2))


def test_epochs_and_seeds_have_their_own_orders():
    first = stretch(Order([1000], None, 5), 0, 2000)[1]
    other = stretch(Order([1000], None, 6), 0, 1000)[1]
    streams = [first[:1000], first[1000:], other, np.arange(1000)]
    for i, one in enumerate(streams):
        for another in streams[:i]:
            assert abs(np.corrcoef(one, another)[0, 1]) < 0.15
            assert (one == another).sum() < 10


@pytest.mark.parametrize("size", [3, 4])
def test_every_order_is_as_likely(size: int):
    epochs = 24_000
    orders = stretch(Order([size], None, 0), 0, size * epochs)[1].reshape(epochs, size)
    counts = np.unique(orders, axis=0, return_counts=True)[1]
    expected = epochs / (6 if size == 3 else 24)
    assert len(counts) == epochs // expected
    assert np.abs(counts - expected).max() < 6 * np.sqrt(expected)


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=6), st.integers(0, 3 * PERIOD))
@settings(deadline=None)
def test_mixtures_hold_in_any_stretch(weights: list[float], start: int):
    groups, _ = stretch(Order([7] * len(weights), weights, 0), start, 1000)
    counts = np.bincount(groups, minlength=len(weights))
    for count, weight in zip(counts, weights, strict=True):
        expected = 1000 * weight / sum(weights)
        assert abs(count - expected) <= 2 + 1000 * len(weights) / PERIOD


def test_sources_of_a_mixture_have_their_own_epochs():
    sizes = [5, 31]
    groups, rows = stretch(Order(sizes, [1.0, 3.0], 4), 0, 2 * PERIOD)
    assert Counter(groups.tolist()) == {0: PERIOD // 2, 1: PERIOD // 2 * 3}
    for group, size in enumerate(sizes):
        own = rows[groups == group]
        whole = own[: len(own) // size * size].reshape(-1, size)
        assert (np.sort(whole, axis=1) == np.arange(size)).all()


@pytest.mark.parametrize("weights", [[1e-9, 1.0], [1.0, 2.0, 1e-7, 3.0]])
def test_small_weights_still_take_part(weights: list[float]):
    groups, _ = stretch(Order([3] * len(weights), weights, 0), 0, 2 * PERIOD)
    assert set(groups.tolist()) == set(range(len(weights)))
