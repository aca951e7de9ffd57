"""The pipeline: one `shard_map`, manual over dp and pp, around the executor of a schedule.

The loss is the sum of cross entropies times their weights, which enter as the cotangent of the
last stage: microbatches, dp, pp and fp16's loss scale are then all one sum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig
from jaxdist.models.transformer import Transformer
from jaxdist.parallel.executor import Executor
from jaxdist.parallel.layer_order import LayerOrder
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.parallel.sharding import Rules, gradient_specs, layouts, only, parameter_specs

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model on a mesh, trained by one schedule."""

    model: ModelConfig
    parallel: ParallelConfig
    mesh: MeshShape
    schedule: Schedule
    compute_dtype: DTypeLike
    reduce_dtype: DTypeLike
    skip_bubbles: bool  # run no layer in an empty slot, by a dynamic trip count

    @cached_property
    def rules(self) -> Rules:
        """Which mesh axis shards what."""
        return Rules.of(self.model, self.parallel, self.mesh)

    @cached_property
    def layers(self) -> LayerOrder:
        """Where each layer lies."""
        parallel = self.parallel
        return LayerOrder.of(
            self.model.num_hidden_layers,
            self.mesh.pp,
            parallel.num_chunks,
            parallel.layer_counts,
        )

    def loss_and_gradients(
        self, parameters: Transformer, microbatches: Microbatches
    ) -> tuple[Array, Transformer]:
        """Weighted loss summed over the global batch, and its gradient in the layout of ZeRO.

        Runs under `jax.set_mesh`; takes and gives logical (global) arrays, stacks of layers in the
        order of `layers`.
        """
        tree = layouts(parameters, self.rules)
        zero = self.parallel.zero
        region = jax.shard_map(
            lambda p, m: Executor(self, tree, p, m).train(),
            axis_names={"dp", "pp"},
            in_specs=(_manual(parameter_specs(tree, zero)), P(None, "dp")),
            out_specs=(P(), _manual(gradient_specs(tree, zero))),
        )
        return region(parameters, microbatches)

    def loss(self, parameters: Transformer, microbatches: Microbatches) -> Array:
        """Weighted loss summed over the global batch, without gradients."""
        tree = layouts(parameters, self.rules)
        region = jax.shard_map(
            lambda p, m: Executor(self, tree, p, m).evaluate(),
            axis_names={"dp", "pp"},
            in_specs=(_manual(parameter_specs(tree, self.parallel.zero)), P(None, "dp")),
            out_specs=P(),
        )
        return region(parameters, microbatches)

    def residual_rings(
        self, parameters: Transformer, batch_shape: tuple[int, ...]
    ) -> list[jax.ShapeDtypeStruct]:
        """What one (dp, pp) member keeps from forward to backward; allocates nothing.

        `parameters` may be abstract, `batch_shape` is [M, B, T] of the global batch. tp shards
        some of the rings; their shapes here are whole.
        """
        batch = Microbatches.abstract(batch_shape)
        return self.member_shapes(Executor.empty_residuals, parameters, batch)

    def member_shapes(
        self,
        made: Callable[[Executor], list[Array]],
        parameters: Transformer,
        microbatches: Microbatches,
    ) -> list[jax.ShapeDtypeStruct]:
        """Shapes of arrays that one (dp, pp) member makes, whole where tp shards them."""
        tree = layouts(parameters, self.rules)
        members = self.mesh.dp * self.mesh.pp
        region = jax.shard_map(
            lambda p, m: made(Executor(self, tree, p, m)),
            axis_names={"dp", "pp"},
            in_specs=(_manual(parameter_specs(tree, self.parallel.zero)), P(None, "dp")),
            out_specs=P(("dp", "pp")),
        )
        return [
            jax.ShapeDtypeStruct((a.shape[0] // members, *a.shape[1:]), a.dtype)
            for a in jax.eval_shape(region, parameters, microbatches)
        ]


def _manual(specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: only(spec, "dp", "pp"), specs)
