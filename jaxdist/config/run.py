"""The whole of a run's config."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from jaxdist.config import checks, limits
from jaxdist.config.compute import ParallelConfig, PrecisionConfig
from jaxdist.config.data import DataConfig
from jaxdist.config.mesh_shape import MeshShape
from jaxdist.config.model import ModelConfig
from jaxdist.config.output import CheckpointConfig, EvalConfig, LogConfig, ProfileConfig
from jaxdist.config.training import OptimizerConfig, TrainConfig

RESUME = ("auto", "must", "never")


def _tiny() -> ModelConfig:
    return ModelConfig.from_preset("tiny")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that a training run is told.

    Building one refuses whatever cannot work, before a device is touched.

    Attributes:
        name: Name of the run; the stem of the config file.
        mesh: Degrees of parallelism, 8x4x2 for dp=8, pp=4, tp=2; one may be -1, for what is left.
        simulate: Whether the CPU stands in for as many devices as the mesh has.
        output_dir: The run's folder; where empty it becomes runs/<name>.
        resume: auto continues from the newest checkpoint if there is one, must refuses to start
            without one, never refuses to start where there is one.
        init_from: Model to start from: a Hugging Face folder, a .gguf file, a run's folder, or a
            name on the hub such as owner/model. It gives the model section, and the tokenizer
            where data.tokenizer is not set. A run that resumes takes its own weights.
        seed: Of the parameters and the order of the data.
        dry_run: Compile the step, report memory and collectives, and end.
    """

    name: str = "run"
    mesh: str = "-1x1x1"
    simulate: bool = False
    output_dir: str = ""
    resume: str = "auto"
    init_from: str | None = None
    seed: int = 0
    dry_run: bool = False
    model: ModelConfig = field(default_factory=_tiny)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        limits.path("name", self.name)
        limits.flag("simulate", self.simulate)
        limits.choice("resume", self.resume, RESUME)
        if self.init_from is not None:
            limits.path("init_from", self.init_from)
        limits.whole("seed", self.seed, 0, 2**32 - 1)
        limits.flag("dry_run", self.dry_run)
        if not self.output_dir:
            object.__setattr__(self, "output_dir", f"runs/{self.name}")
        limits.path("output_dir", self.output_dir)
        object.__setattr__(self, "optimizer", self._filled_optimizer())
        checks.check_run(self)

    def _filled_optimizer(self) -> OptimizerConfig:
        """The optimizer with warmup_steps, and for wsd decay_steps, as numbers."""
        steps, optimizer = self.train.steps, self.optimizer
        if optimizer.warmup_steps is None:
            optimizer = replace(optimizer, warmup_steps=steps // 20)
        if optimizer.decay_steps is None and optimizer.schedule == "wsd":
            optimizer = replace(optimizer, decay_steps=steps // 10)
        return optimizer

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh; its -1, if any, is still to be resolved against the device count."""
        return MeshShape.parse(self.mesh)

    @property
    def run_dir(self) -> Path:
        """The run's folder: config.yaml, metrics.jsonl, checkpoints/, loss.png."""
        return Path(os.path.expanduser(self.output_dir))
