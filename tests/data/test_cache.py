"""Built once: whole or not at all, whoever else builds it and whenever one is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxdist.config import UsageError
from jaxdist.data import cache
from jaxdist.data.cache import BUILDING, build_once, cache_root

# A builder that writes half of its files, says so, and takes its time over the other half.
SLOW_BUILDER = """
import sys, time
from pathlib import Path
from jaxdist.data.cache import build_once

def build(folder):
    (folder / "one").write_text("1")
    with open(sys.argv[2], "a") as log:
        log.write("building\\n")
    time.sleep(float(sys.argv[3]))
    (folder / "two").write_text("2")

print(sorted(file.name for file in build_once(Path(sys.argv[1]), build).iterdir()))
"""


def start(folder: Path, log: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_BUILDER, str(folder), str(log), str(seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.01)


def test_built_once_and_kept(tmp_path: Path):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("x")

    folder = tmp_path / "deep" / "made"
    assert build_once(folder, build) == folder == build_once(folder, build)
    assert len(calls) == 1 and (folder / "a").read_text() == "x"


def test_a_failed_build_leaves_nothing(tmp_path: Path):
    def build(folder: Path) -> None:
        (folder / "a").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="no space is left for .*made; .*data.cache_dir"):
        build_once(tmp_path / "made", build)
    assert [path.name for path in tmp_path.iterdir()] == ["made.lock"]


def test_processes_wait_for_the_one_that_builds(tmp_path: Path):
    folder, log = tmp_path / "made", tmp_path / "log"
    processes = [start(folder, log, 0.5) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out for out, _ in outputs] == ["['one', 'two']\n"] * 3
    assert log.read_text() == "building\n"
    assert sum("waiting for the process" in err for _, err in outputs) == 2


def test_a_killed_builder_is_replaced(tmp_path: Path):
    folder, log = tmp_path / "made", tmp_path / "log"
    killed = start(folder, log, 60)
    wait_for(log)
    waiting = start(folder, log, 0)
    time.sleep(0.2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate(timeout=60)
    assert waiting.communicate(timeout=60)[0] == "['one', 'two']\n"
    assert log.read_text() == "building\n" * 2
    assert not list(tmp_path.glob(f"*{BUILDING}*")), "the killed builder's folder is still there"


def test_without_locks_the_first_rename_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache, "fcntl", None)
    folder, log = tmp_path / "made", tmp_path / "log"

    def build(temporary: Path) -> None:
        (temporary / "a").write_text("mine")
        folder.mkdir()
        (folder / "a").write_text("other")

    assert (build_once(folder, build) / "a").read_text() == "other"
    assert not list(tmp_path.glob(f"*{BUILDING}*")) and not log.exists()


def test_cache_root_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "jaxdist"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "jaxdist"
    assert cache_root(str(tmp_path / "chosen")) == tmp_path / "chosen"


def test_cache_root_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = cache_root()
    assert found.parent == tmp_path and found == cache_root()
    assert "jaxdist: warning: " in capsys.readouterr().err
    with pytest.raises(UsageError, match="data.cache_dir=.*file/sub cannot be written"):
        cache_root(str(tmp_path / "file" / "sub"))
