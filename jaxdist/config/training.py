"""How long to train, on how much, and by which update rule."""

from dataclasses import dataclass

from jaxdist.config import limits
from jaxdist.config.errors import UsageError

OPTIMIZERS = ("adamw", "adam", "lion", "adafactor", "sgd", "muon")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its learning-rate schedule.

    Attributes:
        name: adamw, adam, lion, adafactor, sgd, or muon (for matrices; adamw for the rest).
        learning_rate: The schedule's peak.
        schedule: After the warm-up: constant, linear, cosine, or wsd (constant, then a final
            decay).
        warmup_steps: Steps in which the rate rises linearly from 0; null takes 5 % of train.steps.
        decay_steps: Steps of wsd's final decay; null takes 10 % of train.steps.
        min_learning_rate_ratio: Where a decaying schedule ends, as a part of the peak.
        weight_decay: Decoupled decay of matrices and embeddings (adam: none); norms and biases are
            not decayed.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        momentum: Of sgd and muon.
        max_grad_norm: Gradients with a larger global norm are scaled down to it; null: never.
        ema_decay: Keep an exponential moving average of the parameters with this decay, which
            `jaxdist convert --ema` takes; null: none.
    """

    name: str = "adamw"
    learning_rate: float = 3e-4
    schedule: str = "cosine"
    warmup_steps: int | None = None
    decay_steps: int | None = None
    min_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    max_grad_norm: float | None = 1.0
    ema_decay: float | None = None

    def __post_init__(self):
        limits.choice("optimizer.name", self.name, OPTIMIZERS)
        limits.number("optimizer.learning_rate", self.learning_rate, minimum=0)
        limits.choice("optimizer.schedule", self.schedule, LEARNING_RATE_SCHEDULES)
        if self.warmup_steps is not None:
            limits.whole("optimizer.warmup_steps", self.warmup_steps, 0)
        if self.decay_steps is not None:
            limits.whole("optimizer.decay_steps", self.decay_steps, 0)
        limits.number("optimizer.min_learning_rate_ratio", self.min_learning_rate_ratio, 0, 1)
        limits.number("optimizer.weight_decay", self.weight_decay, minimum=0)
        limits.number("optimizer.beta1", self.beta1, minimum=0, below=1)
        limits.number("optimizer.beta2", self.beta2, minimum=0, below=1)
        limits.number("optimizer.eps", self.eps, above=0)
        limits.number("optimizer.momentum", self.momentum, minimum=0, below=1)
        if self.max_grad_norm is not None:
            limits.number("optimizer.max_grad_norm", self.max_grad_norm, above=0)
        if self.ema_decay is not None:
            limits.number("optimizer.ema_decay", self.ema_decay, above=0, below=1)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and how much.

    Attributes:
        steps: Optimizer steps of the whole run; schedules are made for it.
        stop_after: End the run after this step, as if interrupted; null: at `steps`.
        global_batch_size: Sequences in a step, over all devices.
        sequence_length: Tokens in a sequence.
        on_nonfinite: What to do at a NaN or inf in the loss or the gradients: stop, or skip the
            step.
    """

    steps: int = 1000
    stop_after: int | None = None
    global_batch_size: int = 16
    sequence_length: int = 256
    on_nonfinite: str = "stop"

    def __post_init__(self):
        limits.whole("train.steps", self.steps, 1)
        if self.stop_after is not None:
            limits.whole("train.stop_after", self.stop_after, 1)
            if self.stop_after > self.steps:
                raise UsageError(
                    f"train.stop_after={self.stop_after} is past train.steps={self.steps}; "
                    f"choose at most {self.steps}"
                )
        limits.whole("train.global_batch_size", self.global_batch_size, 1)
        limits.whole("train.sequence_length", self.sequence_length, 2)
        limits.choice("train.on_nonfinite", self.on_nonfinite, ("stop", "skip"))
