"""Where each layer lies: how the model's layers are spread over stages and chunks.

The model is cut into stretches of layers; stretch v*S+s is chunk v of stage s. At rest a stack has
one row a layer in the order of stages, then of a stage's chunks, every stretch as long as the
longest: so dim 0 is cut evenly over pp, and a row that no layer fills is zero, has no gradient and
stays zero. With one chunk and equal stages that is the model's own order. Checkpoints and exports
always hold the model's own order, so that one schedule resumes what another has saved.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

EMPTY = -1


@dataclass(frozen=True)
class LayerOrder:
    """`counts` are the layers of each stretch, from the model's first on."""

    counts: tuple[int, ...]
    num_stages: int

    @classmethod
    def of(
        cls,
        num_layers: int,
        num_stages: int,
        num_chunks: int = 1,
        counts: tuple[int, ...] | None = None,
    ) -> "LayerOrder":
        """`num_layers` over the stretches: as `counts` say, or as evenly as can be.

        All stages hold a slice of the embedding and of the head and work on it together, so that
        layers alone make stages differ. The stretches that are longer by one are the last: theirs
        are the activations that are held the shortest.
        """
        if counts is None:
            parts = num_stages * num_chunks
            counts = tuple((num_layers + part) // parts for part in range(parts))
        assert sum(counts) == num_layers and len(counts) == num_stages * num_chunks
        return cls(counts, num_stages)

    @property
    def num_chunks(self) -> int:
        return len(self.counts) // self.num_stages

    @property
    def most(self) -> int:
        """Rows of a stretch: the layers of the longest."""
        return max(self.counts)

    @property
    def num_rows(self) -> int:
        """Rows of a stack at rest."""
        return len(self.counts) * self.most

    @property
    def is_even(self) -> bool:
        """Whether all stretches are equally long."""
        return min(self.counts) == self.most

    @property
    def is_plain(self) -> bool:
        """Whether a stack at rest has the model's own order."""
        return self.is_even and self.num_chunks == 1

    @cached_property
    def table(self) -> np.ndarray:
        """[chunks, stages] layers of each stretch."""
        return np.array(self.counts, np.int32).reshape(self.num_chunks, self.num_stages)

    @cached_property
    def rows(self) -> np.ndarray:
        """[rows] the layer in each row of a stack at rest, or EMPTY."""
        first = np.concatenate([[0], np.cumsum(self.counts)[:-1]]).reshape(self.table.shape)
        place = np.arange(self.most)
        layers = np.where(place < self.table[..., None], first[..., None] + place, EMPTY)
        return layers.transpose(1, 0, 2).reshape(-1)  # [stages, chunks, most]

    @cached_property
    def places(self) -> np.ndarray:
        """[layers] the row of each layer."""
        places = np.empty(sum(self.counts), np.int64)
        filled = np.flatnonzero(self.rows != EMPTY)
        places[self.rows[filled]] = filled
        return places


def at_rest(model: Any, order: LayerOrder) -> Any:
    """A model whose stacks, in the model's own order, are put in the order at rest."""
    return _with_stacks(model, order, partial(to_rest, order=order))


def in_models_order(model: Any, order: LayerOrder) -> Any:
    """The way back."""
    return _with_stacks(model, order, partial(from_rest, order=order))


def to_rest(stack: Array, order: LayerOrder) -> Array:
    """[layers, ...] -> [rows, ...]; rows without a layer are zero."""
    filled = (order.rows != EMPTY).reshape(-1, *(1,) * (stack.ndim - 1))
    taken = jnp.take(stack, jnp.asarray(np.maximum(order.rows, 0)), axis=0)
    return taken if filled.all() else jnp.where(filled, taken, jnp.zeros_like(taken))


def from_rest(stack: Array, order: LayerOrder) -> Array:
    """[rows, ...] -> [layers, ...]"""
    return jnp.take(stack, jnp.asarray(order.places), axis=0)


def _with_stacks(model: Any, order: LayerOrder, change: Callable[[Array], Array]) -> Any:
    if order.is_plain:
        return model
    leaves, structure = jax.tree.flatten(model)
    copy = jax.tree.unflatten(structure, leaves)
    copy.layers = jax.tree.map(change, model.layers)
    return copy
