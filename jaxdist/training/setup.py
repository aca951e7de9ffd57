"""Everything a run is made of, built from its config before the first step.

Order matters: whatever can be refused is refused before a file is written or a step compiled.
"""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdist.config import MeshShape, RunConfig, UsageError
from jaxdist.config.checks import check_mesh
from jaxdist.config.init_from import check_same_weights
from jaxdist.models.transformer import Transformer
from jaxdist.parallel.mesh import make_mesh, shape_of
from jaxdist.parallel.pipeline import Pipeline
from jaxdist.parallel.schedules.named import open_schedule
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.precision import Policy
from jaxdist.training import layer_order
from jaxdist.training.batches import abstract_batch
from jaxdist.training.checkpoint import Checkpointer
from jaxdist.training.model_source import open_model
from jaxdist.training.optimizer import make_optimizer
from jaxdist.training.state import StateLayout, TrainState, initial_state
from jaxdist.training.step import Batch, make_eval_step, make_train_step


@dataclass(frozen=True)
class Setup:
    """A run's mesh, pipeline, optimizer and compiled steps; nothing is compiled until asked for.

    Raises `UsageError` where the devices do not carry the mesh or the mesh does not fit the model.
    """

    config: RunConfig
    mesh: Mesh

    @classmethod
    def of(cls, config: RunConfig) -> "Setup":
        """Build the mesh over the devices there are."""
        if config.mesh_shape.pp != -1:
            _schedule(config, config.mesh_shape.pp)  # refused before a device is touched
        mesh = make_mesh(config.mesh_shape, config)
        check_mesh(config, shape_of(mesh))
        _check_processes(mesh.devices, jax.process_count())
        return cls(config, mesh)

    @property
    def mesh_shape(self) -> MeshShape:
        """The mesh's degrees, with -1 filled in."""
        return shape_of(self.mesh)

    @cached_property
    def policy(self) -> Policy:
        """The run's dtypes."""
        return Policy.from_config(self.config.precision)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The run's optimizer."""
        return make_optimizer(self.config.optimizer, self.config.train.steps, self.policy)

    @cached_property
    def pipeline(self) -> Pipeline:
        """The model on the mesh."""
        parallel = self.config.parallel
        on_cpu = self.mesh.devices.flat[0].platform == "cpu"
        skip = on_cpu if parallel.skip_bubbles is None else parallel.skip_bubbles
        return Pipeline(
            model=self.config.model,
            parallel=parallel,
            mesh=self.mesh_shape,
            schedule=_schedule(self.config, self.mesh_shape.pp),
            compute_dtype=self.policy.compute_dtype,
            reduce_dtype=self.policy.reduce_dtype,
            skip_bubbles=skip,
        )

    @cached_property
    def layout(self) -> StateLayout:
        """Where each array of the state lives."""
        pipeline = self.pipeline
        return StateLayout.of(
            self.config, self.policy, self.optimizer, pipeline.rules, pipeline.layers
        )

    @property
    def description(self) -> str:
        """What is trained, and how it is spread, in one line."""
        parallel = self.config.parallel
        count = sum(leaf.size for leaf in jax.tree.leaves(self.layout.abstract.params))
        shape = ", ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        microbatches = parallel.num_microbatches
        return (
            f"{self.config.name}, {count:,} parameters, on {shape}: ZeRO-{parallel.zero}, "
            f"{parallel.schedule}, {microbatches} microbatch{'es' * (microbatches != 1)}, remat "
            f"{parallel.remat}, {self.config.precision.policy}"
        )

    def initial_state(self) -> TrainState:
        """The state before the first step, born in its shards."""
        init = partial(
            initial_state, self.config, self.policy, self.optimizer, layers=self.pipeline.layers
        )
        given = () if self.config.init_from is None else (self._given_parameters(),)
        with jax.set_mesh(self.mesh):
            shardings = self.layout.shardings(self.mesh)
            return jax.jit(init, out_shardings=shardings, donate_argnums=range(len(given)))(*given)

    def _given_parameters(self) -> Transformer:
        """The parameters that the run starts from."""
        assert self.config.init_from is not None
        source = open_model(self.config.init_from, "--init-from")
        check_same_weights(self.config.model, source.config, self.config.init_from)
        own, layers = self.layout.target(self.mesh).params, self.pipeline.layers
        given = source.parameters(layer_order.target(own, layers))
        return layer_order.at_rest(given, own, layers)

    def save(self, checkpoints: Checkpointer, step: int, state: TrainState, extra: Any) -> None:
        """Begin to save `state` as checkpoint `step`, with its layers in the model's order."""
        checkpoints.save(step, layer_order.in_models_order(state, self.pipeline.layers), extra)

    def check_saved(self, checkpoints: Checkpointer, step: int) -> None:
        """Refuse to go on from checkpoint `step` where it holds another kind of state."""
        own = self.layout.target(self.mesh)
        checkpoints.check(step, layer_order.target(own, self.pipeline.layers))

    def restore(self, checkpoints: Checkpointer, step: int) -> tuple[TrainState, dict[str, Any]]:
        """The state of checkpoint `step`, and what was saved with it."""
        own, layers = self.layout.target(self.mesh), self.pipeline.layers
        state, extra = checkpoints.restore(step, layer_order.target(own, layers))
        return layer_order.at_rest(state, own, layers), extra

    def abstract_batch(self) -> Batch:
        """Shapes and shardings of a global batch."""
        train = self.config.train
        return abstract_batch(
            self.mesh,
            self.config.parallel.num_microbatches,
            train.global_batch_size,
            train.sequence_length,
        )

    def compile_train_step(self) -> jax.stages.Compiled:
        """The step `(state, batch) -> (state, metrics)`; donates the state."""
        step = make_train_step(self.config, self.policy, self.pipeline, self.optimizer, self.layout)
        state = self.layout.target(self.mesh)
        with jax.set_mesh(self.mesh):
            jitted = jax.jit(
                step,
                donate_argnums=0,
                out_shardings=(self.layout.shardings(self.mesh), None),
            )
            return jitted.lower(state, self.abstract_batch()).compile()

    def compile_eval_step(self) -> jax.stages.Compiled:
        """The step `(params, batch) -> sums`."""
        params = self.layout.target(self.mesh).params
        with jax.set_mesh(self.mesh):
            step = jax.jit(make_eval_step(self.pipeline))
            return step.lower(params, self.abstract_batch()).compile()


def _check_processes(devices: np.ndarray, num_processes: int) -> None:
    """Refuse a mesh that leaves a process without a device: it could not take part in the step."""
    have_one = {device.process_index for device in devices.flat}
    if len(have_one) < num_processes:
        raise UsageError(
            f"mesh {'x'.join(map(str, devices.shape))} takes {devices.size} devices, which are "
            f"those of {len(have_one)} of {num_processes} processes; choose a mesh that takes all "
            "devices, or start fewer processes"
        )


def _schedule(config: RunConfig, num_stages: int) -> Schedule:
    parallel = config.parallel
    return open_schedule(
        parallel.schedule, num_stages, parallel.num_microbatches, parallel.num_chunks
    )
