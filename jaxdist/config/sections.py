"""The sections of a run's config other than the model: how to train, on what, and what to keep.

Each checks its own fields when built; what two sections must agree on is checked in `checks.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.config import limits
from jaxdist.config.errors import UsageError, did_you_mean
from jaxdist.config.frozen import frozen

ZERO_STAGES = (0, 1, 2, 3)
SCHEDULES = ("gpipe", "1f1b")
SAVED_ACTIVATIONS = ("qkv", "attn_out", "mlp_hidden")  # names given by jaxdist/models
POLICIES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}  # policy -> compute dtype
OPTIMIZERS = ("adamw", "adam", "lion", "adafactor", "sgd", "muon")
LEARNING_RATE_SCHEDULES = ("constant", "linear", "cosine", "wsd")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the step is laid over the mesh.

    Attributes:
        zero: What is sharded over dp: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too.
        schedule: Order of forward and backward passes over pp: 1f1b keeps few activations, gpipe all.
        num_microbatches: Parts that a data-parallel rank's batch is cut into; gradients are accumulated.
        remat: What the backward pass recomputes: none, full (all of a block), dots (all but matrix
            products), or a comma list of activations to save: qkv, attn_out, mlp_hidden.
        sequence_parallel: Whether activations between blocks are sharded over tp along the sequence.
        skip_bubbles: Whether idle pipeline slots skip their compute by a conditional; null: on CPU only.
    """

    zero: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    remat: str = "none"
    sequence_parallel: bool = False
    skip_bubbles: bool | None = None

    def __post_init__(self):
        limits.choice("parallel.zero", self.zero, ZERO_STAGES)
        limits.choice("parallel.schedule", self.schedule, SCHEDULES)
        limits.whole("parallel.num_microbatches", self.num_microbatches, 1)
        limits.text("parallel.remat", self.remat)
        if self.remat not in ("none", "full", "dots"):
            for name in self.saved_activations:
                if name not in SAVED_ACTIVATIONS:
                    raise UsageError(
                        f"parallel.remat={self.remat!r}: {name!r} is none of none, full, dots, or a comma list out of "
                        f"{', '.join(SAVED_ACTIVATIONS)}{did_you_mean(name, SAVED_ACTIVATIONS)}"
                    )
        limits.flag("parallel.sequence_parallel", self.sequence_parallel)
        if self.skip_bubbles is not None:
            limits.flag("parallel.skip_bubbles", self.skip_bubbles)

    @property
    def saved_activations(self) -> tuple[str, ...]:
        """The names in `remat` where it lists activations; empty for none, full and dots."""
        if self.remat in ("none", "full", "dots"):
            return ()
        return tuple(name.strip() for name in self.remat.split(","))


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats, by policy and, where one wants it otherwise, by role.

    Attributes:
        policy: fp32; bf16 or fp16: compute in it, everything else in fp32 (fp16 with a loss scale).
        param_dtype: Of the master parameters; null takes the policy's (so for all roles).
        compute_dtype: Of matrix products and activations.
        reduce_dtype: In which gradients are accumulated and reduced over dp.
        moment_dtype: Of the optimizer's moments.
        loss_scale_init: First loss scale (fp16).
        loss_scale_growth_interval: Steps without overflow after which the scale doubles.
        loss_scale_hysteresis: Overflows that are borne before the scale is halved.
        loss_scale_min: Floor of the scale.
    """

    policy: str = "bf16"
    param_dtype: str | None = None
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    moment_dtype: str | None = None
    loss_scale_init: float = 65536.0
    loss_scale_growth_interval: int = 2000
    loss_scale_hysteresis: int = 2
    loss_scale_min: float = 1.0

    def __post_init__(self):
        limits.choice("precision.policy", self.policy, tuple(POLICIES))
        for role in ("param_dtype", "compute_dtype", "reduce_dtype", "moment_dtype"):
            value = getattr(self, role)
            if value is None:
                continue
            value = POLICIES.get(value, value)
            limits.choice(f"precision.{role}", value, tuple(POLICIES.values()))
            if value == "float16" and role in ("param_dtype", "moment_dtype"):
                raise UsageError(
                    f"precision.{role}=float16 loses updates below 6e-8; choose float32 or bfloat16 "
                    f"(fp16 training keeps float32 masters)"
                )
            object.__setattr__(self, role, value)
        limits.number("precision.loss_scale_min", self.loss_scale_min, above=0)
        limits.number("precision.loss_scale_init", self.loss_scale_init, minimum=self.loss_scale_min, maximum=2.0**24)
        limits.whole("precision.loss_scale_growth_interval", self.loss_scale_growth_interval, 1)
        limits.whole("precision.loss_scale_hysteresis", self.loss_scale_hysteresis, 1)

    @property
    def needs_loss_scale(self) -> bool:
        """Whether the compute dtype is float16, whose gradients underflow unscaled."""
        return (self.compute_dtype or POLICIES[self.policy]) == "float16"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its learning-rate schedule.

    Attributes:
        name: adamw, adam, lion, adafactor, sgd, or muon (for matrices; adamw for the rest).
        learning_rate: The schedule's peak.
        schedule: After the warm-up: constant, linear, cosine, or wsd (constant, then a final decay).
        warmup_steps: Steps in which the rate rises linearly from 0; null takes 5 % of train.steps.
        decay_steps: Steps of wsd's final decay; null takes 10 % of train.steps.
        min_learning_rate_ratio: Where a decaying schedule ends, as a part of the peak.
        weight_decay: Decoupled decay of matrices; embeddings, norms and biases are not decayed.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        momentum: Of sgd and muon.
        max_grad_norm: Gradients with a larger global norm are scaled down to it; null: never.
        ema_decay: Keep an exponential moving average of the parameters with this decay; null: none.
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
        on_nonfinite: What to do at a NaN or inf in the loss or the gradients: stop, or skip the step.
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
                    f"train.stop_after={self.stop_after} is past train.steps={self.steps}; choose at most {self.steps}"
                )
        limits.whole("train.global_batch_size", self.global_batch_size, 1)
        limits.whole("train.sequence_length", self.sequence_length, 2)
        limits.choice("train.on_nonfinite", self.on_nonfinite, ("stop", "skip"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, how it becomes tokens, and how tokens become rows.

    Attributes:
        sources: Files, globs, directories or dataset names, each a text or a mapping of path, weight
            (its part in the mixture) and field (the text's name in jsonl and parquet); `embedded` is
            the text inside the package, `synthetic` makes tokens up.
        tokenizer: bytes, or the path of a tokenizer.json, a SentencePiece model or a GGUF file.
        validation_fraction: Part of the documents that is held back for validation.
        pack: Whether several documents share a row (attention and loss do not cross their border).
        cache_dir: Where tokenized data is kept; null takes the user's cache directory.
    """

    sources: Sequence[str | Mapping[str, Any]] = ("embedded",)
    tokenizer: str = "bytes"
    validation_fraction: float = 0.05
    pack: bool = True
    cache_dir: str | None = None

    def __post_init__(self):
        sources = [self.sources] if isinstance(self.sources, (str, Mapping)) else self.sources
        if not isinstance(sources, (list, tuple)) or not sources:
            raise UsageError(f"data.sources={self.sources!r} must list at least one source")
        object.__setattr__(self, "sources", tuple(_checked_source(source) for source in sources))
        limits.text("data.tokenizer", self.tokenizer)
        limits.number("data.validation_fraction", self.validation_fraction, minimum=0, below=1)
        limits.flag("data.pack", self.pack)
        if self.cache_dir is not None:
            limits.text("data.cache_dir", self.cache_dir)


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
        first, colon, last = self.steps.partition(":") if isinstance(self.steps, str) else ("", "", "")
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
            raise UsageError(f"profile.steps={self.steps!r} must be FIRST:LAST with 1 <= FIRST <= LAST, such as 10:12")

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


def _checked_source(source: Any) -> str | Mapping[str, Any]:
    """A source with its fields checked; a mapping comes back frozen."""
    if isinstance(source, str):
        limits.text("data.sources", source)
        return source
    if not isinstance(source, Mapping):
        raise UsageError(f"data.sources: {source!r} must be a path or a mapping of path, weight and field")
    for key in source:
        if key not in ("path", "weight", "field"):
            hint = did_you_mean(str(key), ("path", "weight", "field"))
            raise UsageError(f"data.sources: {key!r} is not one of path, weight, field{hint}")
    limits.text("data.sources.path", source.get("path"))
    if source.get("weight") is not None:
        limits.number("data.sources.weight", source["weight"], above=0)
    if source.get("field") is not None:
        limits.text("data.sources.field", source["field"])
    return frozen(source)
