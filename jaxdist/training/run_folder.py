"""The folder that a training run leaves, as the doors that use a trained model read it.

Beside checkpoints and logs it holds `origin/`: the tokenizer, generation config and config.json of
the model that the run started from, so that the run stands on its own.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.config import ModelConfig, RunConfig, UsageError
from jaxdist.config.layers import load
from jaxdist.interop.leaves import TABLES, layers_of, leaf_shapes
from jaxdist.precision import Policy
from jaxdist.training.checkpoint import Checkpointer
from jaxdist.training.metrics import FILE as METRICS
from jaxdist.training.metrics import TENSORBOARD
from jaxdist.training.plot import PLOT

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

CONFIG = "config.yaml"
ORIGIN = "origin"
LOCK = ".lock"


def open_run(run: str | Path) -> "RunFolder":
    """Open a run's folder by its config."""
    run = Path(os.path.expanduser(run))
    return RunFolder(run, load(run / CONFIG))


def check_place(run: Path) -> None:
    """Refuse a place where the run's folder can plainly not be written; makes nothing."""
    places = (run / "checkpoints", run, *run.absolute().parents)
    place = next(place for place in places if os.path.lexists(place))
    try:
        os.stat(run)
    except (FileNotFoundError, NotADirectoryError):  # the second is said below, with the place
        pass
    except OSError as error:  # a name too long, say
        raise _cannot_be_written(run, error.strerror) from error
    if not place.is_dir():
        raise _cannot_be_written(run, f"{place} is not a folder")
    if not os.access(place, os.W_OK | os.X_OK):
        raise _cannot_be_written(run, f"nothing may be written in {place}")
    for name in (CONFIG, METRICS, PLOT, LOCK):
        # A pipe, say, would be opened when the step is compiled, and block.
        if os.path.lexists(run / name) and not (run / name).is_file():
            raise _cannot_be_written(run, f"{run / name} is not a file")
    if os.path.lexists(run / TENSORBOARD) and not (run / TENSORBOARD).is_dir():
        raise _cannot_be_written(run, f"{run / TENSORBOARD} is not a folder")


def check_writable(run: Path) -> None:
    """Make a run's folder; UsageError where nothing can be written there."""
    try:
        for folder in (run, run / "checkpoints"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
    except (OSError, ValueError) as error:
        raise _cannot_be_written(run, getattr(error, "strerror", None) or error) from error


def _cannot_be_written(run: Path, reason: object) -> UsageError:
    return UsageError(f"--output-dir {run} cannot be written: {reason}; choose another folder")


@contextmanager
def alone_in(run: Path) -> Iterator[None]:
    """Hold a run's folder against a second trainer, which would mix its rows and checkpoints in.

    The kernel lets go of it when the process dies. Of several processes the first holds it; where
    the system or the file system has no locks, nobody does.
    """
    if fcntl is None or jax.process_index() != 0:
        yield
        return
    try:
        file = open(run / LOCK, "w")
    except OSError as error:  # of another user, say
        raise _cannot_be_written(run, f"{LOCK}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"--output-dir {run}: another process trains there; wait for it, or choose another "
                "folder"
            ) from None
        except OSError:  # no locks here
            pass
        yield


@dataclass(frozen=True)
class RunFolder:
    """The model of a run's newest complete checkpoint, one weight at a time.

    averaged: The weights are the exponential moving average of the run's, which it must have.
    """

    folder: Path
    run: RunConfig
    averaged: bool = False

    def average(self) -> "RunFolder":
        """The same with averaged weights; UsageError where the run has none."""
        if self.run.optimizer.ema_decay is None:
            raise UsageError(
                f"{self.folder} was trained without optimizer.ema_decay, so it has no average of "
                "its weights"
            )
        return replace(self, averaged=True)

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return self.run.model

    @property
    def dtype(self) -> str:
        """In which the weights are kept, such as "float32"."""
        kept = Policy.from_config(self.run.precision).param_dtype
        return "float32" if self.averaged else str(kept)

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the weights."""
        return tuple(leaf_shapes(self.config))

    @property
    def tokenizer(self) -> str:
        """The run's tokenizer, as `load_tokenizer` takes it: the copy in the folder, if any."""
        origin = self.folder / ORIGIN
        kept = any((origin / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
        return str(origin) if kept else self.run.data.tokenizer

    def load(self, name: str, layer: int | None = None) -> np.ndarray:
        """A weight (of a stack: one layer's) as it was saved, tables without padding rows."""
        array = self._leaf(name)
        if name in TABLES:
            array = array[: self.config.vocab_size]
        return array if layer is None else array[layer]

    def weights(self) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """(name, layer or None, array) of every weight, a whole stack after the other."""
        for name in self.tensor_names:
            for layer in layers_of(name, self.config):
                yield name, layer, self.load(name, layer)

    def restore(self, like: Any) -> Any:
        """Parameters in the structure, dtypes and shardings of `like`; all padding as saved."""
        checkpoints = Checkpointer(self.folder / "checkpoints", None)
        try:
            part = "ema" if self.averaged else "params"
            return checkpoints.restore_part(self._step(checkpoints), part, like)
        finally:
            checkpoints.close()

    def _step(self, checkpoints: Checkpointer) -> int:
        step = checkpoints.latest_step()
        if step is None:
            raise UsageError(
                f"no checkpoint in {self.folder / 'checkpoints'}; train until one is complete"
            )
        return step

    @cached_property
    def _leaf(self) -> Any:
        """name -> the whole weight on the host; the last one is kept for its other layers."""

        @lru_cache(1)
        def leaf(name: str) -> np.ndarray:
            shape = leaf_shapes(self.config)[name]
            if name in TABLES:
                shape = (self.config.padded_vocab_size, *shape[1:])
            target = {name: jax.ShapeDtypeStruct(shape, np.dtype(self.dtype))}
            return np.asarray(self.restore(target)[name])

        return leaf
