"""The door `python -m jaxdist.train`, from outside."""

import subprocess
import sys
from pathlib import Path

import pytest


def train(*words: str, code: str = "") -> subprocess.CompletedProcess[str]:
    command = ["-m", "jaxdist.train"] if not code else ["-c", code]
    return subprocess.run(
        [sys.executable, *command, *words], text=True, capture_output=True, timeout=60
    )


def test_refusals_load_no_jax() -> None:
    code = """
import sys
from jaxdist.train import main
try: main(["--optimizer.learning_rat", "1"])
except SystemExit as stop: print(stop.code, "jax" in sys.modules)
try: main(["--print-config"])
except SystemExit as stop: print(stop.code, "jax" in sys.modules)
"""
    done = train(code=code)
    lines = done.stdout.splitlines()
    assert (lines[0], lines[-1]) == ("2 False", "0 False")


def test_a_bare_train_is_asked_what() -> None:
    done = train()
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "give --config FILE, such as configs/quickstart.yaml" in done.stderr


def test_a_refusal_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = train("--output-dir", str(out), "--mesh", "1x1x3", "--simulate")
    assert done.returncode == 2 and not out.exists()
    assert done.stderr.startswith("jaxdist: error: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("flag", ["--help", "--print-config"])
def test_prints_and_ends_well(flag: str) -> None:
    done = train(flag)
    assert done.returncode == 0 and "learning_rate" in done.stdout and not done.stderr


def test_a_reader_that_has_gone_is_no_error() -> None:
    command = [sys.executable, "-m", "jaxdist.train", "--print-config"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout and process.stderr
    process.stdout.close()
    assert (process.wait(60), process.stderr.read()) == (141, b"")
    process.stderr.close()
