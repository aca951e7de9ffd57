"""Where a run's figures go: `metrics.jsonl` always, TensorBoard and wandb where asked for.

One row (a dict of numbers with `step`) per step. The file is the record: a resumed run takes the
rows after its checkpoint out of it, for it makes those steps again.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import LogConfig, UsageError
from jaxdist.training.event_file import EventFile

FILE, TENSORBOARD = "metrics.jsonl", "tensorboard"


class MetricsLog:
    """The rows of one run; does nothing but on process 0.

    `resume_step` is the step of the restored checkpoint, 0 for a fresh start. Raises `UsageError`
    where the directory cannot be written or wandb is asked for and missing.
    """

    def __init__(self, run_dir: str | Path, config: LogConfig, resume_step: int = 0) -> None:
        self._path = Path(run_dir) / FILE
        self._file = self._tensorboard = self._wandb = None
        if jax.process_index() != 0:
            return
        if config.wandb:
            self._wandb = _start_wandb(config.wandb, self._path.parent)
        with self._clear_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            drop_rows_after(self._path, resume_step)
            # Unbuffered: a killed run has its rows, and a full disk is met once, at a write.
            self._file = self._path.open("ab", buffering=0)
        if config.tensorboard:
            with self._clear_errors(self._path.with_name(TENSORBOARD)):
                self._tensorboard = EventFile(self._path.with_name(TENSORBOARD), resume_step)

    def write(self, row: Mapping[str, float]) -> None:
        """Adds the row of one step."""
        if self._file is None:
            return
        line = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        with self._clear_errors(self._path):
            while line:  # a disk that is nearly full takes a part; the next try says why
                line = line[self._file.write(line) :]
        step = int(row["step"])
        values = {name: value for name, value in row.items() if name != "step"}
        if self._tensorboard is not None:
            with self._clear_errors(self._path.with_name(TENSORBOARD)):
                self._tensorboard.write(step, values)
        if self._wandb is not None:
            self._wandb.log(values, step=step)

    def flush(self) -> None:
        """Returns when every row so far is on the disk, in a file that is still there."""
        if self._file is None:
            return
        with self._clear_errors(self._path):
            os.fsync(self._file.fileno())
            if os.fstat(self._file.fileno()).st_nlink == 0:
                raise UsageError(
                    f"{self._path} was removed while the run wrote to it; start the run again, and "
                    "leave its folder alone"
                )
        if self._tensorboard is not None:
            with self._clear_errors(self._path.with_name(TENSORBOARD)):
                self._tensorboard.flush()

    def close(self) -> None:
        """Closes all of them."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    @contextmanager
    def _clear_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def check_installed(config: LogConfig) -> None:
    """Refuse what is asked for and not installed, before there is a step to log."""
    if config.wandb:
        _wandb(config.wandb)


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a `metrics.jsonl`, without lines that a killed run has left unfinished."""
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def drop_rows_after(path: Path, step: int) -> None:
    """Takes the rows of later steps, and unfinished lines, out of the file; atomically."""
    if not path.exists():
        return
    kept = [row for row in read_rows(path) if row["step"] <= step]
    temporary = path.with_suffix(".jsonl.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _finite(row: Mapping[str, float]) -> dict[str, float | None]:
    """JSON knows no NaN or infinity: they become null."""
    return {name: value if math.isfinite(value) else None for name, value in row.items()}


def _start_wandb(project: str, run_dir: Path) -> Any:
    wandb = _wandb(project)
    try:
        return wandb.init(project=project, name=run_dir.name, dir=str(run_dir))
    except wandb.Error as error:  # not logged in, or no way there
        raise UsageError(f"log.wandb={project}: {error}; or leave log.wandb out") from error


def _wandb(project: str) -> Any:
    try:
        return importlib.import_module("wandb")  # an extra, absent in most installs
    except ImportError as error:
        raise UsageError(
            f"log.wandb={project} needs the package wandb: pip install 'jaxdist[wandb]', "
            "or leave log.wandb out"
        ) from error
