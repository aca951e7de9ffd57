"""Every schedule gives the gradients of one device, and so do stages of different lengths."""

from typing import Any

import numpy as np
import pytest

from jaxdist.parallel.schedules.named import interleaved, one_f_one_b
from jaxdist.parallel.schedules.rings import IDLE
from jaxdist.parallel.schedules.schedule import Schedule

FIVE: dict[str, Any] = dict(model=dict(num_hidden_layers=5, vocab_multiple=24))

# Chunks with fitting, left-over and too few microbatches; weight gradients apart, with and without
# recomputing, over tp and in shards; short stages with and without loops of fixed length.
CASES = {
    "interleaved": ("1x2x1", dict(schedule="interleaved", num_chunks=2, num_microbatches=4)),
    "inbox": ("1x2x1", dict(schedule="interleaved", num_chunks=2, num_microbatches=5, zero=0)),
    "few": ("2x4x1", dict(schedule="interleaved", num_microbatches=2, zero=3, remat="full")),
    "one stage": ("1x1x1", dict(schedule="interleaved", num_chunks=2, num_microbatches=3)),
    "chunks over tp": (
        "1x2x4",
        dict(schedule="interleaved", num_chunks=2, num_microbatches=4, skip_bubbles=False),
    ),
    "zb": ("1x4x1", dict(schedule="zb", num_microbatches=5)),
    "zb over tp": ("2x2x2", dict(schedule="zb", num_microbatches=4, zero=3, skip_bubbles=False)),
    "zb, recomputed": ("1x2x1", dict(schedule="zb", num_microbatches=3, zero=2, remat="full")),
    "uneven": ("1x2x1", dict(num_microbatches=3, **FIVE)),
    "uneven, fixed loops": ("1x3x1", dict(num_microbatches=4, skip_bubbles=False, **FIVE)),
    "layout": ("2x3x1", dict(layout="1,3,1", num_microbatches=4, zero=3, schedule="zb", **FIVE)),
    "uneven chunks": (
        "1x2x1",
        dict(schedule="interleaved", num_chunks=2, num_microbatches=4, skip_bubbles=False, **FIVE),
    ),
}
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, router_aux_loss_coef=0.3)
WINDOWS = dict(sliding_window=3, sliding_window_pattern=2)
CASES |= {
    "experts, zb": ("1x2x1", dict(schedule="zb", num_microbatches=3, model=EXPERTS)),
    "experts, uneven": (
        "1x2x2",
        dict(num_microbatches=3, skip_bubbles=False, model=FIVE["model"] | EXPERTS),
    ),
    "windows by layer": (
        "1x2x1",
        dict(
            schedule="interleaved",
            num_chunks=2,
            num_microbatches=2,
            model=FIVE["model"] | WINDOWS,
        ),
    ),
    "offload": ("1x2x2", dict(offload_activations=True, num_microbatches=3, zero=2)),
    "offload and zb": (
        "1x2x1",
        dict(offload_activations=True, schedule="zb", num_microbatches=4, dtype="float32"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(make_case, name):
    mesh, options = CASES[name]
    make_case(mesh, **options).assert_agrees()


@pytest.mark.slow
def test_the_loss_alone(make_case):
    case = make_case("1x2x1", schedule="interleaved", num_chunks=2, num_microbatches=5, **FIVE)
    np.testing.assert_allclose(case.loss(), case.plain()[0], rtol=1e-5)


def by_hand(change):
    """1F1B for 2 stages and 4 microbatches, three ticks longer, changed by hand."""
    base = one_f_one_b(2, 4)
    rest = np.full((3, 2), IDLE, np.int32)
    forward, backward = (np.concatenate([t, rest]) for t in (base.forward, base.backward))
    return Schedule("by hand", *change(forward, backward))


def late_second_stage(forward, backward):
    """What arrives waits a tick in the inbox; the last stage scores and takes back later."""
    forward[1:, 1] = forward[:-1, 1].copy()
    backward[3:, 1] = backward[:-3, 1].copy()
    backward[:3, 1] = IDLE
    backward[3:, 0] = backward[:-3, 0].copy()
    backward[:4, 0] = IDLE
    return forward, backward


def with_weights_late(forward, backward):
    """Weight gradients of all microbatches after the last backward."""
    weight = np.full_like(backward, IDLE)
    forward, backward, weight = (
        np.concatenate([t, np.full((2, 2), IDLE, np.int32)]) for t in (forward, backward, weight)
    )
    weight[-4:] = np.arange(4)[::-1, None]
    return forward, backward, weight


def chunks_and_weights(*_):
    base = interleaved(2, 2, 2)
    rest = np.full((4, 2), IDLE, np.int32)
    forward, backward = (np.concatenate([t, rest]) for t in (base.forward, base.backward))
    weight = np.full_like(backward, IDLE)
    weight[-4:] = np.array([3, 1, 2, 0])[:, None]
    return forward, backward, weight, 2


@pytest.mark.parametrize(
    "change, skip_bubbles",
    [
        pytest.param(late_second_stage, False, marks=pytest.mark.slow),
        pytest.param(late_second_stage, True, marks=pytest.mark.slow),
        pytest.param(with_weights_late, True, marks=pytest.mark.slow),
        pytest.param(chunks_and_weights, False, marks=pytest.mark.slow),
    ],
)
def test_a_table_of_ones_own(make_case, change, skip_bubbles):
    table = by_hand(change)
    options = dict(schedule="mine.csv", num_chunks=table.num_chunks)
    case = make_case(
        "1x2x1",
        table=table,
        num_microbatches=table.num_microbatches,
        skip_bubbles=skip_bubbles,
        **options,
    )
    case.assert_agrees()
