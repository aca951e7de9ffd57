"""A global batch cut into microbatches, as the pipeline takes it.

Shapes: M microbatches, B rows of a microbatch, T tokens.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxdist.ops.stacks import read


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A global batch cut into microbatches; dp shards dim 1."""

    tokens: Array  # [M, B, T] int32
    labels: Array  # [M, B, T] int32
    weights: Array  # [M, B, T] fp32, what each token's cross entropy counts
    segment_ids: Array  # [M, B, T] int32, 0 = padding
    positions: Array  # [M, B, T] int32

    @classmethod
    def abstract(cls, shape: tuple[int, ...]) -> "Microbatches":
        """Microbatches of `shape` [M, B, T] without numbers in them."""
        whole: Any = jax.ShapeDtypeStruct(shape, jnp.int32)
        weights: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
        return cls(tokens=whole, labels=whole, weights=weights, segment_ids=whole, positions=whole)

    def at(self, index: Array) -> "Microbatches":
        """One microbatch, [B, T]; an IDLE index gives some microbatch, whose result is unused."""
        index = jnp.maximum(index, 0)
        return jax.tree.map(lambda a: read(a, index), self)
