"""Guesses equal those of a plain search through the text."""

import time

from hypothesis import given
from hypothesis import strategies as st

from jaxdist.inference.guidance.speculation import NgramIndex


def search(tokens, count, shortest, longest):
    for length in range(min(longest, len(tokens)), shortest - 1, -1):
        for start in range(len(tokens) - 1, length - 1, -1):
            if tokens[start - length : start] == tokens[-length:]:
                follow = list(tokens)
                for i in range(count):
                    follow.append(follow[start + i])
                return follow[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.lists(st.integers(1, 5), max_size=20),
    st.integers(1, 3),
    st.integers(0, 2),
)
def test_guesses_are_what_followed_last_time(tokens, steps, shortest, more):
    index, end = NgramIndex(shortest, shortest + more), 0
    for step in [*steps, len(tokens)]:
        end = min(end + step, len(tokens))
        known = tokens[:end]
        assert index.propose(known, 4) == search(known, 4, shortest, shortest + more)


def test_the_work_of_a_step_does_not_grow_with_the_text():
    index, tokens = NgramIndex(2, 4), [i * i % 9973 for i in range(50_000)]
    index.propose(tokens, 4)
    began = time.perf_counter()
    for i in range(200):
        tokens.append(i)
        index.propose(tokens, 4)
    assert time.perf_counter() - began < 0.2
