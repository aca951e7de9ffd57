"""A run's schedule out of a file: refused before a device is touched."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from jaxdist.config import UsageError
from jaxdist.config.command_line import parse
from jaxdist.parallel.schedules.csv_file import write_table
from jaxdist.parallel.schedules.named import open_schedule
from jaxdist.training import setup
from jaxdist.training.setup import Setup


def setup_of(table: Path, *flags: str) -> Setup:
    flags = ("--parallel.schedule", str(table), "--parallel.num_microbatches", "4", *flags)
    return Setup.of(parse(["--mesh", "1x2x1", *flags], "jaxdist train"))


def test_the_file_is_the_schedule(tmp_path: Path):
    table = tmp_path / "mine.csv"
    write_table(open_schedule("interleaved", 2, 4, 2), table)
    pipeline = setup_of(table, "--parallel.num_chunks", "2").pipeline
    assert pipeline.schedule.name == str(table) and pipeline.layers.num_chunks == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("F0,\n,F0\n,B0\nB0,\nB1 F1,F1 B1\n", "tick 4, stage 1: forward of microbatch 1 before"),
        ("F0,\n,F0\n,B0\nB0,\n", "has 1 microbatches, not 4"),
        ("F0\nB0\n", "has 1 stages, not 2"),
    ],
)
def test_a_table_that_cannot_run(tmp_path: Path, monkeypatch, text, words):
    def no_device(*_):
        raise AssertionError("a device was asked for")

    monkeypatch.setattr(setup, "make_mesh", no_device)
    table = tmp_path / "mine.csv"
    table.write_text(text)
    with pytest.raises(UsageError, match=words):
        setup_of(table)
    with pytest.raises(UsageError, match="none.csv cannot be read"):
        setup_of(tmp_path / "none.csv")


@pytest.mark.parametrize("places, fits", [([0, 0, 1, 1], True), ([0, 0], False)])
def test_every_process_has_a_device_of_the_mesh(places, fits):
    devices = np.array([SimpleNamespace(process_index=i) for i in places]).reshape(-1, 1, 1)
    if fits:
        setup._check_processes(devices, 2)
        return
    with pytest.raises(UsageError, match="mesh 2x1x1 takes 2 devices.* of 1 of 2 processes"):
        setup._check_processes(devices, 2)
