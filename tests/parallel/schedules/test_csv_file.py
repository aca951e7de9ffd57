"""A schedule's file is read as it was written, and what is wrong in it is named."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxdist.config import UsageError
from jaxdist.parallel.schedules.csv_file import read_table, write_table
from jaxdist.parallel.schedules.named import SCHEDULES, open_schedule
from jaxdist.parallel.schedules.schedule import Schedule


def same(a: Schedule, b: Schedule) -> bool:
    tables = [(x.forward, x.backward, x.weight) for x in (a, b)]
    return a.num_chunks == b.num_chunks and all(
        (x is None) == (y is None) and (x is None or np.array_equal(x, y))
        for x, y in zip(*tables, strict=True)
    )


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 12))
def test_written_and_read(tmp_path_factory, name, num_stages, count):
    schedule = open_schedule(name, num_stages, count)
    path = tmp_path_factory.getbasetemp() / "table.csv"
    write_table(schedule, path)
    assert same(read_table(path), schedule)
    assert same(open_schedule(str(path), num_stages, count, schedule.num_chunks), schedule)


def test_comments_titles_and_blanks(tmp_path: Path):
    path = tmp_path / "mine.csv"
    path.write_text(
        "# two stages\ufeff\nfirst,second\nF0,-\n\nF1 ,  F0 B0\n B0 ,B1 F1\nB1\n,\n\n", "utf-8"
    )
    assert same(read_table(path), open_schedule("1f1b", 2, 2))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("a,b\n-,-\n", "is empty"),
        ("F0\nF1\n", "no backward"),
        ("F0\nB0 X1\n", r"tick 1, stage 0: 'X1' is not known"),
        ("F0 F1\nB0\n", r"tick 0, stage 0: two F in one cell"),
        ("F0,\n,F0\n,B0\nB0 W0,W0\n,W1\n", r"tick 4, stage 1: weight gradient of microbatch 1"),
        ("F0,F0\n,B0\nB0,\n", r"tick 0, stage 1: forward of microbatch 0 before it can be there"),
        ("F0,\n,F0\n,B0\nB0,\n,F1\n", r"stage 0 never runs the forward of microbatch 1"),
        ("F0.5\nB0.5\n", "more than its 2 ticks"),
        ("F99999\nB99999\n", "more than its 2 ticks"),
        ("F0," + "x" * 200_000, "is no CSV: field larger"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text, words):
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=words) as error:
        read_table(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UsageError, match="none.csv cannot be read: No such file"):
        read_table(tmp_path / "none.csv")


def test_it_must_be_what_was_asked_for(tmp_path: Path):
    path = str(tmp_path / "mine.csv")
    write_table(open_schedule("interleaved", 2, 4, 3), path)
    for numbers, words in (
        ((3, 4, 3), "has 2 stages, not 3"),
        ((2, 8, 3), "has 4 microbatches, not 8"),
        ((2, 4, 1), "has 3 chunks, not 1"),
    ):
        with pytest.raises(UsageError, match=f"parallel.schedule=.*mine.csv {words}"):
            open_schedule(path, *numbers)


def test_names():
    with pytest.raises(UsageError, match="did you mean interleaved"):
        open_schedule("interleavd", 2, 4)
    with pytest.raises(UsageError, match="zb has 1 chunk a stage, not 2; choose interleaved"):
        open_schedule("zb", 2, 4, 2)
