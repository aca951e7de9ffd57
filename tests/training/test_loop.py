"""A run from the command line's words to its folder: what it writes, and how it goes on."""

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from jaxdist.config import UsageError
from jaxdist.config.command_line import parse
from jaxdist.training import loop
from jaxdist.training.learning_rate import make_schedule
from jaxdist.training.loop import NonFinite, run
from jaxdist.training.metrics import read_rows
from jaxdist.training.run_folder import LOCK, alone_in
from jaxdist.training.setup import Setup

TINY = """--model.preset tiny --model.num_hidden_layers 2 --model.hidden_size 16
 --model.intermediate_size 32 --model.num_attention_heads 2 --model.num_key_value_heads 2
 --train.sequence_length 16 --train.global_batch_size 8 --parallel.num_microbatches 2
 --precision.policy fp32 --log.progress false --log.tensorboard false --train.steps 6
 --checkpoint.every 2 --optimizer.warmup_steps 0""".split()


def train(folder: Path, *flags: str, mesh: str = "2x2x2") -> int:
    return run(parse([*TINY, "--mesh", mesh, "--output-dir", str(folder), *flags], "jaxdist train"))


def rows(folder: Path) -> dict[int, dict]:
    return {row["step"]: row for row in read_rows(folder / "metrics.jsonl")}


def curve(folder: Path) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for _, row in sorted(rows(folder).items())]


@pytest.fixture(scope="module")
def whole_on(tmp_path_factory) -> Callable[[str], Path]:
    """`whole_on(mesh)`: the folder of an uninterrupted run of six steps."""

    @cache
    def run_on(mesh: str) -> Path:
        folder = tmp_path_factory.mktemp("whole")
        assert train(folder, "--eval.every", "3", "--eval.batches", "2", mesh=mesh) == 0
        return folder

    return run_on


@pytest.fixture
def whole(whole_on) -> Path:
    """On the mesh that compiles soonest."""
    return whole_on(SMALL)


SMALL = "2x1x1"
on_both_meshes = pytest.mark.parametrize(
    "mesh", [SMALL, pytest.param("2x2x2", marks=pytest.mark.slow)]
)


@on_both_meshes
def test_a_run_leaves_its_folder(whole_on, mesh):
    whole = whole_on(mesh)
    assert {path.name for path in whole.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "checkpoints",
        "loss.png",
    }
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert {"loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"} <= line.keys()
        assert ("val_loss" in line) == (line["step"] % 3 == 0)
        assert all(math.isfinite(value) for value in line.values())
    assert lines[0]["tokens"] * 6 == lines[-1]["tokens"]
    assert lines[0]["loss"] == pytest.approx(math.log(257), rel=0.02)


@on_both_meshes
def test_resumed_equals_uninterrupted_bitwise(whole_on, tmp_path, mesh):
    whole = whole_on(mesh)
    assert train(tmp_path, "--train.stop_after", "4", mesh=mesh) == 0
    assert train(tmp_path, "--resume", "must", mesh=mesh) == 0
    assert curve(tmp_path) == curve(whole)
    assert rows(tmp_path)[6]["tokens"] == rows(whole)[6]["tokens"]


@pytest.mark.parametrize(
    "mesh, zero",
    [
        pytest.param("1x1x1", "0", marks=pytest.mark.slow),
        pytest.param("1x2x1", "1", marks=pytest.mark.slow),
        pytest.param("4x1x2", "3", marks=pytest.mark.slow),
    ],
)
def test_another_mesh_goes_on_with_the_same_curve(whole_on, tmp_path, mesh, zero):
    whole = whole_on("2x2x2")
    assert train(tmp_path, "--train.stop_after", "4") == 0
    assert train(tmp_path, "--resume", "must", "--parallel.zero", zero, mesh=mesh) == 0
    for got, want in zip(curve(tmp_path), curve(whole), strict=True):
        assert got == pytest.approx(want, rel=1e-5)


def test_a_finished_run_is_left_as_it_is_without_compiling(whole, capsys, monkeypatch):
    before = (whole / "metrics.jsonl").read_bytes()
    (whole / "loss.png").unlink()  # as where the run was killed before it was drawn
    monkeypatch.delattr(Setup, "compile_train_step")
    assert train(whole, "--eval.every", "3", mesh=SMALL) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (whole / "loss.png").exists()
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_more_steps_than_before_move_the_decay_which_is_said(whole, capsys, monkeypatch):
    monkeypatch.delattr(Setup, "compile_train_step")
    with pytest.raises(AttributeError, match="compile_train_step"):
        train(whole, "--train.steps", "9", mesh=SMALL)
    said = capsys.readouterr().err
    assert "train.steps: 6 saved, 9 asked; from here on" in said and "schedule of 9 steps" in said


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model.hidden_size", "32"], "model.hidden_size: 16 saved, 32 asked"),
        (["--data.validation_fraction", "0.3"], "validation_fraction"),
        (["--seed", "9"], "seed: 0 saved, 9 asked"),
        (["--resume", "never"], "checkpoint of step 6"),
    ],
)
def test_changed_settings_are_refused(whole, flags, words):
    before = (whole / "config.yaml").read_bytes()
    with pytest.raises(UsageError, match=words):
        train(whole, *flags, mesh=SMALL)
    assert (whole / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    "flags", [["--optimizer.ema_decay", "0.9"], ["--precision.policy", "fp16"]]
)
def test_a_state_that_is_not_in_the_checkpoint_is_refused_before_compiling(
    whole, flags, monkeypatch
):
    monkeypatch.delattr(Setup, "compile_train_step")
    with pytest.raises(UsageError, match="step 6 .* holds no .*other settings"):
        train(whole, "--train.steps", "9", *flags, mesh=SMALL)


def half(content: bytes) -> bytes:
    return content[: len(content) // 2]


def half_zeroed(content: bytes) -> bytes:
    return bytes(len(content) // 2) + content[len(content) // 2 :]


@pytest.mark.parametrize(
    ("part", "spoil"),
    [
        ("state/ocdbt.process_0/d", None),
        ("state/ocdbt.process_0/d", half),
        ("state/ocdbt.process_0/d", half_zeroed),
        ("state/d", half),
        ("state/manifest.ocdbt", half_zeroed),
        ("state/_METADATA", None),
        ("state/_METADATA", half),
        ("extra/metadata", None),
        ("extra/metadata", half),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_compiling(
    whole, tmp_path, monkeypatch, part, spoil
):
    monkeypatch.delattr(Setup, "compile_train_step")
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    longer = ["--train.steps", "9"]
    with pytest.raises(AttributeError, match="compile_train_step"):  # as long as it is whole
        train(run_dir, *longer, mesh=SMALL)
    files = run_dir / "checkpoints" / "6" / part
    if files.is_dir():  # the largest holds the arrays
        files = max(files.iterdir(), key=lambda file: file.stat().st_size)
    content = files.read_bytes()
    files.unlink()
    if spoil is not None:
        files.write_bytes(spoil(content))
    with pytest.raises(UsageError, match=rf"step 6 could not be read.* remove {run_dir}.*/6 to go"):
        train(run_dir, *longer, mesh=SMALL)
    shutil.rmtree(run_dir / "checkpoints" / "6")
    with pytest.raises(AttributeError, match="compile_train_step"):
        train(run_dir, *longer, mesh=SMALL)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, None) for name in ("config", "data", "tokens")),
        ("config", {}),
        ("config", [1]),
        ("data", 3),
        ("tokens", "many"),
    ],
)
def test_a_checkpoint_that_lacks_its_record_is_one_line(whole, tmp_path, name, value, monkeypatch):
    monkeypatch.delattr(Setup, "compile_train_step")
    shutil.copytree(whole, tmp_path / "run")
    file = tmp_path / "run" / "checkpoints" / "6" / "extra" / "metadata"
    record = json.loads(file.read_text())
    del record[name]
    file.write_text(json.dumps(record if value is None else {**record, name: value}))
    with pytest.raises(UsageError, match=rf"checkpoints/6 has no usable {name} in .*remove it"):
        train(tmp_path / "run", "--train.steps", "9", mesh=SMALL)


def test_a_record_that_is_no_object_is_one_line(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "6" / "extra" / "metadata").write_text("[1]")
    with pytest.raises(UsageError, match="step 6 could not be read.*not a JSON object"):
        train(tmp_path / "run", "--train.steps", "9", mesh=SMALL)


def test_other_text_to_validate_on_is_taken(tmp_path):
    for name in ("train", "a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * 400)
    run_dir = tmp_path / "run"
    flags = ["--data.sources", str(tmp_path / "train.txt"), "--eval.every", "2"]
    flags += ["--data.cache_dir", str(tmp_path / "cache")]
    on = {name: ["--data.validation_sources", str(tmp_path / f"{name}.txt")] for name in ("a", "b")}
    assert train(run_dir, *flags, *on["a"], "--train.stop_after", "2", mesh=SMALL) == 0
    assert train(run_dir, *flags, *on["b"], "--train.stop_after", "4", mesh=SMALL) == 0
    assert rows(run_dir)[2]["val_loss"] != rows(run_dir)[4]["val_loss"]
    with pytest.raises(UsageError, match="data.validation_sources: .*b.txt.* saved, .* asked"):
        # Without them a part of the text is held back: the run would train on less.
        train(run_dir, *flags, mesh=SMALL)
    assert (
        train(
            run_dir, *flags, "--data.validation_fraction", "0", "--eval.every", "null", mesh=SMALL
        )
        == 0
    )


def test_a_second_trainer_is_refused(whole, monkeypatch):
    monkeypatch.delattr(Setup, "compile_train_step")
    with alone_in(whole), pytest.raises(UsageError, match="another process trains there"):
        train(whole, "--train.steps", "9", mesh=SMALL)


def test_a_lock_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / LOCK).mkdir()
    with (
        pytest.raises(UsageError, match=r"cannot be written: \.lock: Is a directory"),
        alone_in(tmp_path),
    ):
        pass


def test_an_absent_package_is_named_before_the_text_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="needs the package wandb"):
        train(tmp_path, "--log.wandb", "project", "--data.sources", "/nonexistent.txt", mesh=SMALL)


def test_must_needs_a_checkpoint_and_writes_nothing(tmp_path):
    with pytest.raises(UsageError, match="no checkpoint"):
        train(tmp_path / "run", "--resume", "must")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("part", ["run", "run/checkpoints"])
def test_a_file_in_the_folder_s_place_is_refused_before_the_text_is_read(tmp_path, part):
    (tmp_path / part).parent.mkdir(exist_ok=True)
    (tmp_path / part).write_text("kept")
    with pytest.raises(UsageError, match="--output-dir .*run cannot be written.*choose another"):
        train(tmp_path / "run", "--data.sources", "/nonexistent.txt")
    assert (tmp_path / part).read_text() == "kept"


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "loss.png", "tensorboard"])
def test_a_pipe_in_a_file_s_place_is_refused_before_the_text_is_read(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(UsageError, match=f"cannot be written: .*{name} is not a f"):
        train(tmp_path, "--data.sources", "/nonexistent.txt")
    (tmp_path / name).unlink()
    (tmp_path / name).write_text("") if name == "tensorboard" else (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"cannot be written: .*{name} is not a f"):
        train(tmp_path, "--data.sources", "/nonexistent.txt")


def test_a_picture_that_cannot_be_drawn_is_said(whole, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop, "plot_loss", full)
    assert train(whole, mesh=SMALL) == 0
    assert "loss.png is not drawn: No space left" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["x" * 300, "x" * 300 + "/run", "\udcff", "a\0b"])
def test_a_folder_that_no_file_can_lie_in_is_refused_before_the_text_is_read(tmp_path, name):
    with pytest.raises(UsageError, match="output.dir.*(choose another|rename the|zero byte)"):
        train(tmp_path / name, "--data.sources", "/nonexistent.txt")
    assert not list(tmp_path.iterdir())


def test_the_data_is_described(tmp_path, capsys, monkeypatch):
    monkeypatch.delattr(Setup, "compile_train_step")
    (tmp_path / "a.txt").write_text("abc")
    flags = ["--data.sources", str(tmp_path / "a.txt"), "--data.validation_fraction", "0"]
    with pytest.raises(AttributeError, match="compile_train_step"):
        train(tmp_path / "run", *flags, mesh=SMALL)
    assert "a.txt: 3 tokens in 1 rows of 16, 81.2% padding" in capsys.readouterr().err


def test_a_bad_step_is_named_and_the_last_good_checkpoint_stays(tmp_path):
    flags = ["--optimizer.learning_rate", "1e38", "--checkpoint.every", "1"]
    with pytest.raises(NonFinite, match=r"step 2: (loss|grad_norm).* step 1 is kept"):
        train(tmp_path, *flags, mesh="1x1x1")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["1"]
    assert max(rows(tmp_path)) == 2


@pytest.mark.slow
def test_bad_steps_are_gone_past_where_that_is_asked_for(tmp_path):
    flags = ["--optimizer.learning_rate", "1e38", "--train.on_nonfinite", "skip"]
    assert train(tmp_path, *flags, mesh="1x1x1") == 0
    assert [row.get("skipped") for row in rows(tmp_path).values()] == [None, *[1] * 5]


@pytest.mark.slow
def test_an_overflow_at_the_floor_of_the_scale_stops_the_run(tmp_path):
    flags = ["--precision.policy", "fp16", "--precision.loss_scale_min", "16777216"]
    flags += ["--precision.loss_scale_init", "16777216"]
    with pytest.raises(NonFinite, match="step 1: .*there is no checkpoint yet"):
        train(tmp_path, *flags, mesh="1x1x1")


@pytest.mark.slow
def test_overflowing_steps_are_skipped_counted_and_not_scheduled(tmp_path):
    flags = ["--precision.policy", "fp16", "--precision.loss_scale_hysteresis", "1"]
    flags += ["--precision.loss_scale_init", "16777216", "--train.steps", "12"]
    flags += ["--optimizer.schedule", "linear"]
    # The scale and its counts go on where they were.
    assert train(tmp_path, *flags, "--train.stop_after", "3", mesh="1x1x1") == 0
    assert train(tmp_path, *flags, "--resume", "must", mesh="1x1x1") == 0
    metrics = [row for _, row in sorted(rows(tmp_path).items())]
    skipped = [row for row in metrics if row.get("skipped")]
    assert skipped and len(skipped) < len(metrics)
    optimizer = parse([*TINY, "--mesh", "1x1x1", *flags], "jaxdist train").optimizer
    learning_rate = make_schedule(optimizer, 12)
    updates, scale = 0, 2.0**24
    for row in metrics:
        assert row["learning_rate"] == pytest.approx(float(learning_rate(updates)), rel=1e-6)
        assert row["loss_scale"] == scale
        updates += not row.get("skipped")
        scale /= 2 if row.get("skipped") else 1
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.slow
def test_average_of_parameters_and_trace(tmp_path):
    flags = ["--optimizer.ema_decay", "0.9", "--profile.steps", "2:3"]
    assert train(tmp_path, *flags, mesh="2x1x1") == 0
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def command(folder: Path, *flags: str) -> list[str]:
    words = [*TINY, "--mesh", "1x2x1", "--simulate", "--output-dir", str(folder), *flags]
    return [sys.executable, "-m", "jaxdist.train", *words]


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_saves_says_how_to_go_on_and_ends(tmp_path, number, code):
    process = subprocess.Popen(
        command(tmp_path, "--train.steps", "100000", "--checkpoint.every", "100000"),
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "metrics.jsonl"
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "--resume auto" in errors and "Traceback" not in errors
    (saved,) = (int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert max(rows(tmp_path)) == saved


def last_step(folder: Path) -> int:
    return max(rows(folder), default=0) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_killed_ten_times_a_run_ends_with_the_same_loss(tmp_path):
    flags = ["--train.steps", "250", "--checkpoint.every", "3"]
    subprocess.run(command(tmp_path / "whole", *flags), check=True, capture_output=True)
    chance = random.Random(0)
    killed = tmp_path / "killed"
    for _ in range(10):
        goal = last_step(killed) + chance.randrange(1, 10)
        process = subprocess.Popen(
            command(killed, *flags),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while last_step(killed) < goal:
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.05))
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    subprocess.run(command(killed, *flags), check=True, capture_output=True)
    assert curve(killed)[-1] == curve(tmp_path / "whole")[-1]
