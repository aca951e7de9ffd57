"""What a run is told: frozen dataclasses that refuse what cannot work. No JAX in this room."""

from jaxdist.config.compute import ParallelConfig, PrecisionConfig
from jaxdist.config.data import DataConfig
from jaxdist.config.errors import UsageError, one_line_errors
from jaxdist.config.mesh_shape import MeshShape
from jaxdist.config.model import ModelConfig
from jaxdist.config.output import CheckpointConfig, EvalConfig, LogConfig, ProfileConfig
from jaxdist.config.run import RunConfig
from jaxdist.config.training import OptimizerConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "MeshShape",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "ProfileConfig",
    "RunConfig",
    "TrainConfig",
    "UsageError",
    "one_line_errors",
]
