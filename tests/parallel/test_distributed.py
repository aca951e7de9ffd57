"""Several processes: two of four devices each train as one of eight does."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from jaxdist.config import UsageError
from jaxdist.config.command_line import parse
from jaxdist.parallel import distributed
from jaxdist.training.loop import run

TINY = """--model.preset tiny --model.num_hidden_layers 2 --model.hidden_size 16
 --model.intermediate_size 32 --model.num_attention_heads 2 --model.num_key_value_heads 2
 --train.sequence_length 16 --train.global_batch_size 8 --parallel.num_microbatches 2
 --precision.policy fp32 --log.tensorboard false --train.steps 4 --checkpoint.every 2
 --mesh 2x2x2 --simulate""".split()


def start(folder: Path, *flags: str, **environment: str) -> subprocess.Popen:
    words = [sys.executable, "-m", "jaxdist.train", *TINY, "--output-dir", str(folder), *flags]
    return subprocess.Popen(
        words, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


Curve = list[tuple[float, float]]  # loss and gradient norm of each step


def train_alone(folder: Path, *flags: str) -> Curve:
    """A run of one process: this one, which has eight devices too."""
    assert run(parse([*TINY, "--output-dir", str(folder), *flags], "jaxdist train")) == 0
    return curve(folder)


def train_two(folder: Path, *flags: str, steps: int = 4) -> Curve:
    """A run of two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    group = [
        start(
            folder,
            *flags,
            JAX_COORDINATOR_ADDRESS=address,
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(index),
        )
        for index in range(2)
    ]
    try:
        errors = [process.communicate(timeout=300)[1] for process in group]
    finally:
        for process in group:
            process.kill()
    for process, said in zip(group, errors, strict=True):
        assert process.returncode == 0, said[-2000:]
    return curve(folder, steps)


def curve(folder: Path, steps: int = 4) -> Curve:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, steps + 1))
    return [(row["loss"], row["grad_norm"]) for row in map(json.loads, lines)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Callable[[str], Curve]:
    """`alone(zero)`: the curve of an uninterrupted run of one process."""

    @cache
    def run_with(zero: str) -> Curve:
        return train_alone(tmp_path_factory.mktemp("one"), "--parallel.zero", zero)

    return run_with


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["1", "3"])
def test_two_processes_train_as_one(tmp_path, alone, zero):
    two = train_two(tmp_path, "--parallel.zero", zero)
    for got, want in zip(two, alone(zero), strict=True):
        assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.slow
def test_one_process_goes_on_where_two_stopped(tmp_path, alone):
    whole = alone("1")
    halves = tmp_path / "halves"
    train_two(halves, "--train.stop_after", "2", steps=2)
    assert train_alone(halves, "--resume", "must") == [
        pytest.approx(pair, rel=1e-6) for pair in whole
    ]


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID not set"),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": "2",
            },
            "JAX_PROCESS_ID=2 and JAX_NUM_PROCESSES=2",
        ),
        *(
            (
                {
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": "2",
                    "JAX_PROCESS_ID": "0",
                },
                f"JAX_COORDINATOR_ADDRESS={address} must be HOST:PORT",
            )
            for address in ("node0", "node0:http", "node0:70000")
        ),
    ],
)
def test_half_a_description_is_refused(monkeypatch, environment, words):
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=words):
        distributed.start()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_processes_of_another_launcher_do_not_train_alone(monkeypatch, name):
    for variable in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "1")
    distributed.start()
    monkeypatch.setenv(name, "2")
    with pytest.raises(UsageError, match=f"{name}=2: .* each would train alone; .*JAX_PROCESS_ID"):
        distributed.start()
