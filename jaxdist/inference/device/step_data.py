"""A launch's metadata: one int32 array, packed by the host and taken apart by the program.

Shapes: D replicas, B rows of a replica, T queries, X scored ones, W blocks of a row.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.inference.device.buckets import Shape

FIELDS = 4  # of a row besides its tokens and its table


@dataclass(frozen=True)
class StepData:
    """Metadata [D * B, T + W + FIELDS], of one replica [B, ...]; views of numpy or JAX."""

    tokens: Any  # [B, T], PENDING where the slot's last token is meant
    tables: Any  # [B, W]
    positions: Any  # [B] of the first token
    counts: Any  # [B] tokens that are no padding; 0 in a row of padding
    slots: Any  # [B] within the replica; as many as it has in a row of padding
    samples: Any  # [B] tokens to sample, after the last ones: 1 and the drafts, or 0

    @classmethod
    def of(cls, packed: Any, shape: Shape) -> "StepData":
        """The parts of what was packed for `shape`."""
        tokens, tables = shape.queries, shape.queries + shape.width
        fields = (packed[..., tables + field] for field in range(FIELDS))
        return cls(packed[..., :tokens], packed[..., tokens:tables], *fields)

    @classmethod
    def padding(cls, num_replicas: int, num_slots: int, shape: Shape) -> np.ndarray:
        """Packed rows of nothing but padding."""
        width = shape.queries + shape.width + FIELDS
        packed = np.zeros((num_replicas * shape.rows, width), np.int32)
        cls.of(packed, shape).slots[:] = num_slots
        return packed

    def scored(self, shape: Shape) -> jax.Array:
        """Indices among a row's queries of those that give logits, [B, X]."""
        first_B = jnp.maximum(self.counts - jnp.maximum(self.samples, 1), 0)
        return jnp.minimum(first_B[:, None] + jnp.arange(shape.scored)[None, :], shape.queries - 1)

    def sampler_rows(self, shape: Shape) -> jax.Array:
        """The rows that `sampler.sample` takes, [B, 3 + X - 1]."""
        drafts_BX = jnp.take_along_axis(
            self.tokens, jnp.minimum(self.scored(shape) + 1, shape.queries - 1), axis=1
        )
        position_B = self.positions + self.counts - jnp.maximum(self.samples, 1) + 1
        fields = jnp.stack([self.slots, position_B, self.samples], axis=1)
        return jnp.concatenate([fields, drafts_BX[:, : shape.scored - 1]], axis=1)
