import math

import pytest

from jaxdist.config import OptimizerConfig
from jaxdist.training.learning_rate import make_schedule


def schedule(total: int = 100, **fields):
    config = OptimizerConfig(
        **{
            "learning_rate": 2.0,
            "warmup_steps": 10,
            "decay_steps": None,
            "min_learning_rate_ratio": 0.1,
            **fields,
        }
    )
    return make_schedule(config, total)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_warm_up_starts_above_zero_and_ends_at_the_peak(name):
    rate = schedule(schedule=name)
    assert rate(0) == pytest.approx(2.0 / 11)
    assert rate(4) == pytest.approx(2.0 * 5 / 11)
    assert rate(9) == pytest.approx(2.0 * 10 / 11)
    assert rate(10) == pytest.approx(2.0)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine", "wsd"])
def test_no_warm_up_starts_at_the_peak(name):
    assert schedule(schedule=name, warmup_steps=0)(0) == pytest.approx(2.0)


def test_constant_stays():
    rate = schedule(schedule="constant")
    assert rate(50) == rate(99) == rate(1000) == pytest.approx(2.0)


def test_linear_reaches_the_minimum_one_past_the_last_step():
    rate = schedule(schedule="linear")
    assert rate(55) == pytest.approx(0.2 + 1.8 * 0.5)
    assert rate(99) == pytest.approx(0.2 + 1.8 / 90)
    assert rate(100) == rate(200) == pytest.approx(0.2)


def test_cosine_reaches_the_minimum_one_past_the_last_step():
    rate = schedule(schedule="cosine")
    assert rate(55) == pytest.approx(0.2 + 1.8 * 0.5)
    assert rate(32.5) == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate(99) == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi * 89 / 90)) / 2, abs=1e-6)
    assert rate(100) == rate(200) == pytest.approx(0.2)


def test_wsd_is_stable_and_decays_over_the_last_tenth():
    rate = schedule(schedule="wsd")
    assert rate(11) == rate(90) == pytest.approx(2.0)
    assert rate(95) == pytest.approx(0.2 + 1.8 * 0.5)
    assert rate(99) == pytest.approx(0.2 + 1.8 * 0.1)
    assert schedule(schedule="wsd", decay_steps=40)(80) == pytest.approx(0.2 + 1.8 * 0.5)


def test_minimum_may_be_zero_and_the_last_step_still_learns():
    assert schedule(schedule="cosine", min_learning_rate_ratio=0.0)(99) > 0


def test_warm_up_as_long_as_the_run():
    rate = schedule(total=10, schedule="cosine")
    assert rate(9) == pytest.approx(2.0 * 10 / 11)
    assert math.isfinite(rate(10))


def test_lengths_left_out_are_parts_of_the_run():
    rate = schedule(schedule="wsd", warmup_steps=None, decay_steps=None)
    assert rate(4) == pytest.approx(2.0 * 5 / 6)
    assert rate(5) == rate(90) == pytest.approx(2.0)
    assert rate(91) < 2.0
