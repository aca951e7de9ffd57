"""Temporary memory of the compiled pipeline, from XLA's own analysis."""

import pytest


def temporary(make_case, mesh, num_microbatches, **options):
    case = make_case(mesh, num_microbatches=num_microbatches, **options)
    return case.compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, options",
    [
        ("1x2x1", dict()),
        ("2x2x2", dict(zero=2)),
        ("1x4x1", dict(skip_bubbles=False, remat="full")),
    ],
)
def test_1f1b_is_flat_in_the_number_of_microbatches(make_case, mesh, options):
    few, many = (temporary(make_case, mesh, count, **options) for count in (4, 32))
    assert many < 1.1 * few


@pytest.mark.slow
def test_gpipe_grows_with_it(make_case):
    few, many = (temporary(make_case, "1x2x1", count, schedule="gpipe") for count in (4, 32))
    assert many > 4 * few


@pytest.mark.slow
def test_each_remat_keeps_less(make_case):
    """Activations in flight dominate: 7 microbatches of 4 layers on the first of 4 stages."""
    sizes = [
        temporary(make_case, "1x4x1", 8, remat=remat)
        for remat in ("none", "dots", "attn_out", "full")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] / 2


@pytest.mark.slow
def test_a_sharded_sequence_keeps_less(make_case):
    whole, sharded = (
        temporary(make_case, "1x1x4", 2, remat="full", sequence_parallel=sharded)
        for sharded in (False, True)
    )
    assert sharded < 0.8 * whole


@pytest.mark.slow
def test_gradients_that_are_shards_need_less(make_case):
    """ZeRO-2 accumulates an eighth of what ZeRO-1 does."""
    wide = dict(hidden_size=64, intermediate_size=256)
    one, two = (temporary(make_case, "8x1x1", 2, zero=zero, model=wide) for zero in (1, 2))
    assert two < 0.7 * one
