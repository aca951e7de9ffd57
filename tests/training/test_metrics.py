import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from tensorboardX.proto import event_pb2

from jaxdist.config import LogConfig, UsageError
from jaxdist.training.metrics import MetricsLog, read_rows

FILE_ONLY = LogConfig(tensorboard=False)


def rows_of(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def write_steps(run_dir, first, last, config=FILE_ONLY):
    log = MetricsLog(run_dir, config, resume_step=first - 1)
    for step in range(first, last + 1):
        log.write({"step": step, "loss": 1.0 / step})
    log.close()


def test_one_object_a_step(tmp_path):
    write_steps(tmp_path / "new" / "run", 1, 3)
    assert rows_of(tmp_path / "new" / "run") == [
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": 0.5},
        {"step": 3, "loss": 1 / 3},
    ]


def test_a_row_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    log = MetricsLog(tmp_path, FILE_ONLY)
    log.write({"step": 1, "loss": 2.0})
    assert rows_of(tmp_path) == [{"step": 1, "loss": 2.0}]
    log.flush()
    log.close()


def test_resume_drops_the_rows_that_will_be_made_again(tmp_path):
    write_steps(tmp_path, 1, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed in mid-write
    write_steps(tmp_path, 4, 6)
    assert [row["step"] for row in rows_of(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_fresh_start_begins_with_an_empty_file(tmp_path):
    write_steps(tmp_path, 1, 3)
    write_steps(tmp_path, 1, 1)
    assert rows_of(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_not_finite_values_are_null(tmp_path):
    log = MetricsLog(tmp_path, FILE_ONLY)
    log.write({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    log.close()
    assert rows_of(tmp_path) == [{"step": 1, "loss": None, "grad_norm": None}]


def test_unfinished_lines_are_passed_over(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n[1]\n\xff\xfe\n{"step": "x"}\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_only_process_0_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write_steps(tmp_path / "run", 1, 2, LogConfig(tensorboard=True, wandb="project"))
    assert not (tmp_path / "run").exists()


def test_tensorboard_holds_the_same_figures(tmp_path):
    write_steps(tmp_path, 1, 3, LogConfig(tensorboard=True))
    (path,) = (tmp_path / "tensorboard").iterdir()
    scalars = [
        (event.step, value.tag, round(value.simple_value, 4))
        for event in events(path.read_bytes())
        for value in event.summary.value
    ]
    assert scalars == [(1, "loss", 1.0), (2, "loss", 0.5), (3, "loss", 0.3333)]


@pytest.mark.slow
def test_torch_is_not_imported_for_tensorboard(tmp_path):
    code = (
        "import sys; from pathlib import Path; from jaxdist.config import LogConfig\n"
        "from jaxdist.training.metrics import MetricsLog\n"
        "MetricsLog(Path(sys.argv[1]), LogConfig()).close()\n"
        "print('torch' in sys.modules, 'tensorboardX' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "False True\n"


def events(data: bytes):
    """TFRecords: length (8 bytes), its checksum (4), the event, its checksum (4)."""
    while data:
        length = int.from_bytes(data[:8], "little")
        yield vars(event_pb2)["Event"].FromString(data[12 : 12 + length])
        data = data[16 + length :]


def test_a_file_that_was_removed_is_missed(tmp_path):
    log = MetricsLog(tmp_path, FILE_ONLY)
    log.write({"step": 1, "loss": 2.0})
    log.flush()
    (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(UsageError, match="metrics.jsonl was removed while the run wrote to it"):
        log.flush()
    log.close()


def test_a_full_disk_is_one_line_for_tensorboard_too(tmp_path):
    log = MetricsLog(tmp_path, LogConfig(tensorboard=True))
    assert log._tensorboard is not None
    records = log._tensorboard._writer._py_recordio_writer
    records._writer.close()
    with open("/dev/full", "wb", buffering=0) as full:
        records._writer = full
        with pytest.raises(UsageError, match=f"{tmp_path}/tensorboard cannot be written: No space"):
            log.write({"step": 1, "loss": 1.0})
        log.close()


def test_wandb_without_its_package_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'jaxdist\[wandb\]'"):
        MetricsLog(tmp_path, LogConfig(wandb="project"))


def test_wandb_that_refuses_is_one_line(tmp_path, monkeypatch):
    def init(**_):
        raise ConnectionResetError("no API key")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Error=ConnectionError))
    with pytest.raises(UsageError, match="log.wandb=project: no API key; or leave log.wandb out"):
        MetricsLog(tmp_path, LogConfig(wandb="project"))


def test_an_unwritable_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"{tmp_path}/file/run/metrics.jsonl cannot be written"):
        MetricsLog(tmp_path / "file" / "run", FILE_ONLY)


def test_a_full_disk_is_one_line(tmp_path):
    log = MetricsLog(tmp_path, FILE_ONLY)
    assert log._file is not None
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)
    with pytest.raises(UsageError, match="No space left"):
        log.write({"step": 1, "loss": 1.0})
    log.close()
