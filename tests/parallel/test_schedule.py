"""Schedules keep their promises of time, bubble and memory, and broken tables are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.parallel.schedule import IDLE, SCHEDULES, Schedule, forward_only, gpipe, one_f_one_b

stages, microbatches = st.integers(1, 8), st.integers(1, 32)
costs = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10))


@given(stages, microbatches, costs)
def test_time_and_bubble(num_stages, count, cost):
    forward, backward = cost
    ideal = count * (forward + backward)
    for schedule in (one_f_one_b(num_stages, count), gpipe(num_stages, count)):
        # (M+S-1)(F+B): the S-1 warm-up ticks forward alone, the S-1 last ones backward alone.
        assert np.isclose(
            schedule.time(forward, backward), ideal + (num_stages - 1) * (forward + backward)
        )
        bubble = (num_stages - 1) / (count + num_stages - 1)
        assert np.isclose(schedule.bubble(forward, backward), bubble)
    assert np.isclose(
        forward_only(num_stages, count).time(forward, backward), (count + num_stages - 1) * forward
    )


@given(stages, microbatches)
def test_a_stage_forwards_before_the_next_and_takes_back_after_it(num_stages, count):
    for make in SCHEDULES.values():
        schedule = make(num_stages, count)
        forward, backward = (
            [[table[:, s].tolist().index(m) for m in range(count)] for s in range(num_stages)]
            for table in (schedule.forward, schedule.backward)
        )
        assert np.all(np.diff(forward, axis=0) == 1)
        assert np.all(np.diff(backward, axis=0) == -1)
        assert np.all(np.array(backward) >= np.array(forward))


@given(stages, microbatches)
def test_activations_in_flight(num_stages, count):
    assert one_f_one_b(num_stages, count).peak_in_flight == min(count, 2 * num_stages - 1)
    assert gpipe(num_stages, count).peak_in_flight == count


@given(stages, microbatches)
def test_no_activation_is_overwritten_before_its_backward(num_stages, count):
    """The rings, played through: what a backward reads is what its forward has saved."""
    for make in SCHEDULES.values():
        schedule = make(num_stages, count)
        ring = np.full((num_stages, schedule.num_residual_slots), IDLE)
        for tick in range(schedule.num_ticks):
            for stage in range(num_stages):
                if schedule.forward[tick].max() != IDLE:  # else no stage runs a forward
                    slot = schedule.forward_slots[tick, stage]
                    ring[stage, slot] = schedule.forward[tick, stage]  # IDLE: garbage
            for stage, microbatch in enumerate(schedule.backward[tick]):
                if microbatch != IDLE:
                    assert ring[stage, schedule.backward_slots[tick, stage]] == microbatch
        assert schedule.num_residual_slots <= schedule.peak_in_flight + 1


@given(stages, microbatches)
def test_the_ring_of_1f1b_does_not_grow_with_microbatches(num_stages, count):
    assert one_f_one_b(num_stages, count).num_residual_slots <= 2 * num_stages - 1 + (count == 1)


@given(stages, microbatches)
def test_phases_cover_all_ticks_and_know_their_slots(num_stages, count):
    for make in SCHEDULES.values():
        schedule = make(num_stages, count)
        phases = list(schedule.phases())
        assert [p.start for p in phases] == [0, *(p.stop for p in phases[:-1])]
        assert phases[-1].stop == schedule.num_ticks
        assert len(phases) <= 5  # what is compiled does not grow with M or S
        for phase in phases:
            ticks = slice(phase.start, phase.stop)
            for has, table in (
                (phase.has_forward, schedule.forward[ticks]),
                (phase.has_backward, schedule.backward[ticks]),
                (phase.has_score, schedule.score[ticks, None]),
            ):
                assert np.all((table != IDLE).any(axis=1) == has)


def test_only_gpipe_waits_for_its_backward():
    assert gpipe(4, 3).waits_for_backward and gpipe(1, 2).waits_for_backward
    assert not one_f_one_b(4, 3).waits_for_backward
    assert not forward_only(4, 3).waits_for_backward


def broken(change, make=one_f_one_b):
    good = make(2, 3)
    forward, backward = good.forward.copy(), good.backward.copy()
    change(forward, backward)
    return Schedule("mine", forward, backward)


def repeat_a_forward(forward, backward):
    forward[1, 0] = 0


def leave_out_a_backward(forward, backward):
    backward[backward[:, 1] == 2, 1] = IDLE


def swap_two_forwards_of_the_last_stage(forward, backward):
    forward[[1, 2], 1] = forward[[2, 1], 1]


def swap_two_backwards_of_the_first_stage(forward, backward):
    backward[[2, 3], 0] = backward[[3, 2], 0]


@pytest.mark.parametrize(
    "change, words",
    [
        (repeat_a_forward, ["stage 0", "forward", "[0, 0, 2]", "0..2", "exactly once"]),
        (leave_out_a_backward, ["stage 1", "backward", "[0, 1]", "exactly once"]),
        (
            swap_two_forwards_of_the_last_stage,
            ["tick 2, stage 1", "forward of microbatch 0", "arrives in tick 1"],
        ),
        (
            swap_two_backwards_of_the_first_stage,
            ["tick 3, stage 0", "backward of microbatch 0", "arrives in tick 2"],
        ),
    ],
)
def test_broken_tables_are_refused(change, words):
    with pytest.raises(ValueError, match="schedule 'mine'") as error:
        broken(change)
    for word in words:
        assert word in str(error.value)


def test_a_backward_before_its_forward_is_refused():
    # Both directions fit from stage to stage, but the last stage takes back what it has not got.
    forward = np.array([[IDLE, IDLE], [IDLE, IDLE], [0, IDLE], [IDLE, 0]])
    backward = np.array([[IDLE, 0], [0, IDLE], [IDLE, IDLE], [IDLE, IDLE]])
    with pytest.raises(ValueError, match="tick 0, stage 1: backward of microbatch 0 before"):
        Schedule("mine", forward, backward)
