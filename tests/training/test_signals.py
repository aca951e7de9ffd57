import os
import signal
import socket
import subprocess
import sys

import pytest

from jaxdist.training.signals import StopSignals

LOOP = """
import time
from jaxdist.training.signals import StopSignals

step = 0
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.stop_after(step):
        step += 1
        time.sleep(0.02)
    print("checkpoint", signals.received, flush=True)
    {then}
print("end", flush=True)
"""


def start(then: str = "pass") -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.slow
def test_the_first_ctrl_c_lets_the_loop_finish():
    process = start()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out == "checkpoint 2\nend\n" and process.returncode == 0
    assert err == "stopping after this step; Ctrl-C now aborts without a checkpoint\n"


@pytest.mark.parametrize(
    "first", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ctrl_c_aborts_a_run_that_is_stopping(first):
    process = start(then="time.sleep(60)")  # a checkpoint that takes long
    process.send_signal(first)
    assert process.stdout and process.stdout.readline() == f"checkpoint {int(first)}\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, process.returncode) == ("", 130)
    assert err.endswith("aborted\n") and "Traceback" not in err


@pytest.mark.slow
def test_sigterm_lets_the_loop_finish_and_a_second_one_changes_nothing():
    process = start(then="time.sleep(0.5)")
    process.send_signal(signal.SIGTERM)
    assert process.stdout and process.stdout.readline() == "checkpoint 15\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert out == "end\n" and process.returncode == 0


def test_handlers_are_given_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignals() as signals:
        assert not signals.stop_after(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.received == signal.SIGTERM and signals.stop_after(1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


TWO_PROCESSES = """
import sys, time
import jax
from jaxdist.training.signals import StopSignals

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
step = 0
with StopSignals() as signals:
    print("ready", flush=True)
    while not signals.stop_after(step):
        step += 1
        time.sleep(0.05)
    print("stopped after", step, flush=True)
jax.distributed.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_two_processes_stop_after_the_same_step_when_one_is_signalled(number):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        address = f"localhost:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(index)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    for process in processes:
        assert process.stdout and process.stdout.readline() == "ready\n"
    processes[1].send_signal(number)
    ends = [process.communicate(timeout=60)[0] for process in processes]
    assert ends[0] == ends[1] and ends[0].startswith("stopped after")
