"""Schedules keep their promises of time, bubble and memory, and broken tables are refused."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.parallel.schedules import named
from jaxdist.parallel.schedules.phases import MOST_BODIES
from jaxdist.parallel.schedules.rings import IDLE
from jaxdist.parallel.schedules.schedule import Schedule

# Made once for all tests, none of which changes one.
forward_only, gpipe, interleaved, one_f_one_b, zero_bubble = (
    cache(getattr(named, name))
    for name in ("forward_only", "gpipe", "interleaved", "one_f_one_b", "zero_bubble")
)
stages, microbatches, chunks = st.integers(1, 8), st.integers(1, 32), st.integers(1, 4)
costs = st.tuples(st.floats(0.1, 10), st.floats(0.1, 10))


@st.composite
def any_schedule(draw) -> Schedule:
    num_stages, count = draw(stages), draw(microbatches)
    make = draw(st.sampled_from((one_f_one_b, gpipe, zero_bubble, interleaved)))
    extra = (draw(chunks),) if make is interleaved else ()
    return make(num_stages, count, *extra)


def ticks(table, num_entries):
    """[stages, entries] when each entry runs."""
    return np.array(
        [[table[:, s].tolist().index(e) for e in range(num_entries)] for s in range(table.shape[1])]
    )


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


@settings(deadline=None)
@given(stages, microbatches, chunks, costs)
def test_time_and_bubble_of_chunks(num_stages, count, num_chunks, cost):
    forward, backward = cost
    schedule = interleaved(num_stages, count, num_chunks)
    work = num_chunks * count
    # Fewer microbatches than stages cannot fill the gap between a chunk and the next.
    idle = num_stages - 1 + (num_chunks - 1) * max(num_stages - count, 0)
    assert np.isclose(schedule.time(forward, backward), (work + idle) * (forward + backward))
    assert np.isclose(schedule.bubble(forward, backward, 0.0), idle / (work + idle))
    alone = forward_only(num_stages, count, num_chunks)
    assert np.isclose(alone.time(forward, backward), (work + idle) * forward)


@settings(deadline=None)
@given(stages, microbatches)
def test_weight_gradients_fill_the_bubble(num_stages, count):
    schedule, plain = zero_bubble(num_stages, count), one_f_one_b(num_stages, count)
    if count >= 2 * (num_stages - 1):
        assert schedule.time(1, 1, 1) == 3 * count + num_stages - 1  # ZB-H1
    assert schedule.time(1, 1, 1) <= plain.time(1, 1, 1) - (num_stages > 1)
    assert schedule.residuals.size == plain.residuals.size
    assert schedule.taps is not None and schedule.taps.size <= schedule.residuals.size


@given(stages, microbatches, chunks)
def test_uneven_stages_wait_for_the_longest(num_stages, count, num_chunks):
    schedule = interleaved(num_stages, count, num_chunks)
    layers = np.ones((num_chunks, num_stages))
    even = schedule.time(1, 1, 1, layers)
    layers[0, 0] = 2
    assert 3 * count * (num_chunks + 1) <= schedule.time(1, 1, 1, layers) <= 2 * even


@settings(deadline=None)
@given(any_schedule())
def test_what_is_sent_is_there_before_it_is_used(schedule):
    """Follow each microbatch from layer to layer, in the order of the model."""
    num_chunks, count = schedule.num_chunks, schedule.num_entries
    forward, backward = ticks(schedule.forward, count), ticks(schedule.backward, count)
    for microbatch in range(schedule.num_microbatches):
        path = [(s, v) for v in range(num_chunks) for s in range(schedule.num_stages)]
        down = [forward[s, microbatch * num_chunks + v] for s, v in path]
        up = [backward[s, microbatch * num_chunks + v] for s, v in reversed(path)]
        assert np.all(np.diff(down) >= 1) and np.all(np.diff(up) >= 1) and up[0] >= down[-1]
    if schedule.weight is not None:
        assert np.all(ticks(schedule.weight, count) >= backward)


@given(stages, microbatches)
def test_activations_in_flight(num_stages, count):
    assert one_f_one_b(num_stages, count).peak_in_flight == min(count, 2 * num_stages - 1)
    assert gpipe(num_stages, count).peak_in_flight == count


@given(stages, st.integers(1, 4), chunks)
def test_activations_in_flight_of_chunks(num_stages, rounds, num_chunks):
    schedule = interleaved(num_stages, rounds * num_stages, num_chunks)
    assert schedule.down_inbox is None and schedule.up_inbox is None and schedule.waiting is None
    most = rounds * num_stages * num_chunks
    assert schedule.peak_in_flight == min(most, num_chunks * num_stages + num_stages - 1)


def play(schedule):
    """The rings, played through as the executor does; what is read is what was meant."""
    num_stages, num_chunks = schedule.num_stages, schedule.num_chunks
    rings = {"residuals": schedule.residuals, "taps": schedule.taps, "waiting": schedule.waiting}
    rings |= {"down": schedule.down_inbox, "up": schedule.up_inbox}
    held = {name: np.full((num_stages, ring.size), IDLE) for name, ring in rings.items() if ring}
    carried = {"down": np.full(num_stages, IDLE), "up": np.full(num_stages, IDLE)}

    def put(name, tick, values):
        for stage in range(num_stages):
            held[name][stage, rings[name].writes[tick, stage]] = values[stage]

    def get(name, table, tick, stage):
        return held[name][stage, rings[name].reads(table)[tick, stage]]

    for loop in schedule.loops:
        for turn in range(loop.count):
            for phase in loop.phases:
                for tick in np.arange(phase.start, phase.stop) + turn * loop.period:
                    _play_tick(schedule, phase, tick, rings, held, carried, put, get)
    assert num_chunks >= 1


def _play_tick(schedule, phase, tick, rings, held, carried, put, get):
    last, num_chunks = schedule.num_stages - 1, schedule.num_chunks
    forward, backward = schedule.forward[tick], schedule.backward[tick]
    if "forward" in phase.used:
        put("residuals", tick, forward)
        for stage, entry in enumerate(forward):
            if entry != IDLE and (stage, entry % num_chunks) != (0, 0):
                inbox = rings["down"] is not None
                came = get("down", schedule.forward, tick, stage) if inbox else None
                assert entry == (came if inbox else carried["down"][stage])
        if "score" in phase.used and rings["waiting"] is not None:
            held["waiting"][last, rings["waiting"].writes[tick, 0]] = schedule.score[tick]
        carried["down"] = np.roll(forward, 1)
        carried["down"][0] += carried["down"][0] != IDLE
        if rings["down"] is not None and tick + 1 < schedule.num_ticks:
            put("down", tick + 1, carried["down"])
    if "backward" in phase.used:
        for stage, entry in enumerate(backward):
            if entry == IDLE:
                continue
            assert get("residuals", schedule.backward, tick, stage) == entry
            if (stage, entry % num_chunks) == (last, num_chunks - 1):
                if rings["waiting"] is None:
                    assert schedule.score[tick] == entry // num_chunks
                else:
                    slot = rings["waiting"].reads(schedule.score_backward[:, None])[tick, 0]
                    assert held["waiting"][last, slot] == entry // num_chunks
            elif rings["up"] is not None:
                assert get("up", schedule.backward, tick, stage) == entry
            else:
                assert carried["up"][stage] == entry
        if rings["taps"] is not None:
            put("taps", tick, backward)
        carried["up"] = np.roll(backward, -1)
        carried["up"][last] -= carried["up"][last] != IDLE
        if rings["up"] is not None and tick + 1 < schedule.num_ticks:
            put("up", tick + 1, carried["up"])
    if "weight" in phase.used:
        for stage, entry in enumerate(schedule.weight[tick]):
            if entry != IDLE:
                assert get("residuals", schedule.weight, tick, stage) == entry
                assert get("taps", schedule.weight, tick, stage) == entry


@settings(deadline=None)
@given(any_schedule())
def test_nothing_is_overwritten_before_it_is_read(schedule):
    play(schedule)
    assert schedule.residuals.size <= schedule.peak_in_flight + 1


@settings(deadline=None)
@given(any_schedule(), st.randoms(use_true_random=False))
def test_nothing_is_overwritten_in_a_table_of_ones_own(schedule, random):
    """Idle ticks put in at random: what arrives then waits, in whatever ring it must."""
    gaps = sorted(random.randrange(schedule.num_ticks + 1) for _ in range(random.randrange(4)))

    def stretched(table):
        if table is None:
            return None
        return np.insert(table, gaps, IDLE, axis=0)

    backward = stretched(schedule.backward)
    weight = stretched(schedule.weight)
    delay = random.randrange(3)
    empty = np.full((delay, schedule.num_stages), IDLE, np.int32)
    forward = np.concatenate([stretched(schedule.forward), empty])
    backward = np.concatenate([empty, backward])
    weight = None if weight is None else np.concatenate([empty, weight])
    play(Schedule("mine", forward, backward, weight, schedule.num_chunks))


@given(stages, microbatches)
def test_the_ring_of_1f1b_does_not_grow_with_microbatches(num_stages, count):
    assert one_f_one_b(num_stages, count).residuals.size <= 2 * num_stages - 1 + (count == 1)


@settings(deadline=None)
@given(any_schedule())
def test_loops_cover_all_ticks_and_know_their_slots(schedule):
    place, bodies = 0, 0
    tables = {"forward": schedule.forward, "backward": schedule.backward}
    tables["score"] = schedule.score[:, None]
    if schedule.weight is not None:
        tables["weight"] = schedule.weight
    for loop in schedule.loops:
        for turn in range(loop.count):
            for phase in loop.phases:
                start, stop = (t + turn * loop.period for t in (phase.start, phase.stop))
                assert start == place
                place = stop
                for kind, table in tables.items():
                    busy = table[start:stop] != IDLE
                    assert kind in phase.used or not busy.any()
                    assert kind not in phase.full or busy.all()
        bodies += len(loop.phases)
    assert place == schedule.num_ticks
    assert bodies <= MOST_BODIES  # what is compiled does not grow with M


@settings(deadline=None)
@given(stages, st.integers(2, 6), chunks)
def test_chunks_score_in_their_ticks_alone(num_stages, rounds, num_chunks):
    schedule = interleaved(num_stages, rounds * num_stages, num_chunks)
    scored = [0]
    for loop in schedule.loops:
        for phase in loop.phases:
            scored[0] += loop.count * (phase.stop - phase.start) * ("score" in phase.used)
    assert scored[0] == schedule.num_microbatches


def test_only_gpipe_waits_for_its_backward():
    assert gpipe(4, 3).waiting.peak == 3 and gpipe(1, 2).waiting.peak == 2
    for schedule in (one_f_one_b(4, 3), zero_bubble(4, 3), forward_only(4, 3)):
        assert schedule.waiting is None


def broken(change, make=one_f_one_b):
    good = make(2, 3)
    forward, backward = good.forward.copy(), good.backward.copy()
    weight = np.roll(backward, 1, axis=0)
    return Schedule("mine", *(change(forward, backward, weight) or (forward, backward)))


def repeat_a_forward(forward, backward, weight):
    forward[1, 0] = 0


def leave_out_a_backward(forward, backward, weight):
    backward[backward[:, 1] == 2, 1] = IDLE


def take_back_too_many(forward, backward, weight):
    backward[0, 1] = 7


def swap_two_forwards_of_the_last_stage(forward, backward, weight):
    forward[[1, 2], 1] = forward[[2, 1], 1]


def swap_two_backwards_of_the_first_stage(forward, backward, weight):
    backward[[2, 3], 0] = backward[[3, 2], 0]


def make_weights_too_early(forward, backward, weight):
    return forward, backward, np.roll(backward, -1, axis=0)


def forget_a_chunk(forward, backward, weight):
    return 2 * forward * (forward != IDLE) - (forward == IDLE), backward, None, 2


@pytest.mark.parametrize(
    "change, words",
    [
        (repeat_a_forward, ["tick 1, stage 0", "forward of microbatch 0 a second time"]),
        (leave_out_a_backward, ["stage 1 never", "backward of microbatch 2", "0..2"]),
        (take_back_too_many, ["tick 0, stage 1", "microbatch 7, which has no forward"]),
        (
            swap_two_forwards_of_the_last_stage,
            ["tick 1, stage 1", "forward of microbatch 1 before", "stage 0 sends it in tick 1"],
        ),
        (
            swap_two_backwards_of_the_first_stage,
            ["tick 2, stage 0", "backward of microbatch 1 before", "stage 1 sends it in tick 2"],
        ),
        (make_weights_too_early, ["tick 1, stage 0", "weight gradient of microbatch 0 before"]),
        (forget_a_chunk, ["stage 0 never", "microbatch 0, chunk 1", "for each of 2 chunks"]),
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
