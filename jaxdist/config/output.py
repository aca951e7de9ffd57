"""What a run leaves behind: checkpoints, validation losses, traces and logs."""

import re
from dataclasses import dataclass

from jaxdist.config import limits
from jaxdist.config.errors import UsageError

_STEPS = r"([0-9]{1,10}):([0-9]{1,10})"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save and what to keep; the last step is always saved.

    Attributes:
        every: Steps between two checkpoints.
        keep_last: Number of newest checkpoints that are kept.
        keep_every: Keep every checkpoint whose step is a multiple of this for ever; null: none.
        asynchronous: Whether training goes on while a checkpoint is written.
    """

    every: int = 500
    keep_last: int = 3
    keep_every: int | None = None
    asynchronous: bool = True

    def __post_init__(self):
        limits.whole("checkpoint.every", self.every, 1)
        limits.whole("checkpoint.keep_last", self.keep_last, 1)
        if self.keep_every is not None:
            limits.whole("checkpoint.keep_every", self.keep_every, 1)
        limits.flag("checkpoint.asynchronous", self.asynchronous)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Validation loss during training.

    Attributes:
        every: Steps between two evaluations; null: none.
        batches: Global batches of held-back text in one evaluation.
    """

    every: int | None = None
    batches: int = 8

    def __post_init__(self):
        if self.every is not None:
            limits.whole("eval.every", self.every, 1)
        limits.whole("eval.batches", self.batches, 1)


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """A trace for xprof.

    Attributes:
        steps: First and last step that are traced, as FIRST:LAST, for example 10:12; null: none.
    """

    steps: str | None = None

    def __post_init__(self):
        if self.steps is None:
            return
        found = isinstance(self.steps, str) and re.fullmatch(_STEPS, self.steps)
        if not (found and 1 <= int(found[1]) <= int(found[2])):
            raise UsageError(
                f"profile.steps={self.steps!r} must be FIRST:LAST with 1 <= FIRST <= LAST, "
                f"such as 10:12"
            )

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """The traced steps, both included; None where nothing is traced."""
        if self.steps is None:
            return None
        first, _, last = self.steps.partition(":")
        return int(first), int(last)


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Where progress is shown; metrics.jsonl is always written.

    Attributes:
        tensorboard: Whether TensorBoard files are written.
        wandb: Weights & Biases project to report to (needs the package wandb); null: none.
        progress: Whether a progress bar is drawn.
    """

    tensorboard: bool = True
    wandb: str | None = None
    progress: bool = True

    def __post_init__(self):
        limits.flag("log.tensorboard", self.tensorboard)
        if self.wandb is not None:
            limits.text("log.wandb", self.wandb)
        limits.flag("log.progress", self.progress)
