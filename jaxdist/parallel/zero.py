"""What travels over dp, and when: the ZeRO stages (arXiv 1910.02054) inside the pipeline.

0: one psum after the loop. 1: one reduce-scatter after the loop. 2: a reduce-scatter in each
microbatch, accumulated as a shard. 3: parameters are shards too, gathered layer by layer.
Parameters that no dim of theirs lets dp divide stay whole in every stage.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.parallel.collectives import all_gather, psum, reduce_scatter, vary
from jaxdist.parallel.sharding import Layout, only

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Zero:
    """The collectives of one ZeRO stage; `layer` says that a tree is one layer of a stack."""

    stage: int
    dp: int
    compute_dtype: DTypeLike  # in which gathered matrices travel
    reduce_dtype: DTypeLike  # in which gradients are accumulated and reduced

    @property
    def sums_each_microbatch(self) -> bool:
        """Whether gradients are summed over dp in each microbatch, into a shard."""
        return self.stage >= 2

    @property
    def gathers(self) -> bool:
        """Whether parameters are shards that are gathered where they are used."""
        return self.stage >= 3 and self.dp > 1

    def gather(self, layouts: Tree, parameters: Tree, layer: bool = False) -> Tree:
        """Whole parameters from the shards of ZeRO-3, in their own dtype.

        The way back to the master's dtype cancels against the cast inside `ops.dot`.
        """
        wire = self.gather_wire(layouts, parameters, layer)
        return jax.tree.map(lambda w, a: w.astype(a.dtype), wire, parameters)

    @jax.named_scope("gather_parameters")
    def gather_wire(self, layouts: Tree, parameters: Tree, layer: bool = False) -> Tree:
        """The same as they travel: matrices in the compute dtype."""
        if self.stage < 3:
            return parameters

        def one(layout: Layout, a: Array) -> Array:
            dim, spec = _local(layout, layer)
            if dim is None:
                return a
            wire = a.astype(self.compute_dtype) if a.ndim >= 2 else a
            return all_gather(wire, "dp", dim, spec)

        return jax.tree.map(one, layouts, parameters)

    @jax.named_scope("scatter_gradients")
    def scatter(self, layouts: Tree, gradients: Tree, layer: bool = False) -> Tree:
        """One microbatch's gradients, summed over dp and cut to the shard by ZeRO-2 and 3."""
        if not self.sums_each_microbatch:
            return gradients

        def one(layout: Layout, g: Array) -> Array:
            dim, spec = _local(layout, layer)
            g = g.astype(self.reduce_dtype)
            return g if dim is None else reduce_scatter(g, "dp", dim, spec)

        return jax.tree.map(one, layouts, gradients)

    def accumulators(self, layouts: Tree, parameters: Tree) -> Tree:
        """Zeros for the gradients of the local `parameters`: shards from ZeRO-2 on."""

        def one(layout: Layout, a: Array) -> Array:
            shape = list(a.shape)
            if self.stage == 2 and layout.dp_dim is not None:
                shape[layout.dp_dim] //= self.dp
            axes = tuple(jax.typeof(a).manual_axis_type.varying)
            zeros = vary(jnp.zeros(shape, self.reduce_dtype), axes)
            return lax.with_sharding_constraint(zeros, only(layout.spec, "tp"))

        return jax.tree.map(one, layouts, parameters)

    @jax.named_scope("reduce_gradients")
    def reduce(self, layouts: Tree, gradients: Tree) -> Tree:
        """The reduction after the loop: what no microbatch has summed over dp yet."""

        def one(layout: Layout, g: Array) -> Array:
            dim, spec = _local(layout, layer=False)
            if dim is None or self.stage == 0:
                return psum(g, "dp", spec)
            return reduce_scatter(g, "dp", dim, spec) if self.stage == 1 else g

        return jax.tree.map(one, layouts, gradients)


def _local(layout: Layout, layer: bool) -> tuple[int | None, P]:
    """dp's dim and the tp spec of a parameter, or of one layer of a stack."""
    spec = only(layout.spec, "tp")
    if not layer:
        return layout.dp_dim, spec
    return None if layout.dp_dim is None else layout.dp_dim - 1, P(*spec[1:])
