"""The ends of the pipeline: embedding, scoring, and their gradients, by all stages together.

Shapes: B rows of a microbatch on this dp member, T tokens, D hidden size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from jaxdist.config import ModelConfig
from jaxdist.models.transformer import Transformer, scaled_embedding
from jaxdist.parallel.collectives import vary
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.parallel.schedules.schedule import IDLE
from jaxdist.parallel.vocabulary import (
    Scored,
    Vocabulary,
    first_stage_to_all,
    last_stage_to_all,
)
from jaxdist.parallel.zero import Zero

Tree = Any


class Ends:
    """One member's slices of embedding and head, gathered by `zero` where dp shards them."""

    def __init__(
        self,
        model: ModelConfig,
        vocabulary: Vocabulary,
        zero: Zero,
        layouts: Tree,
        parameters: Transformer,
        microbatches: Microbatches,
    ) -> None:
        self.model, self.vocabulary, self.zero, self.layouts = model, vocabulary, zero, layouts
        self.parameters, self.microbatches = parameters, microbatches
        self.head = "embed_tokens" if parameters.lm_head is None else "lm_head"

    def embed(self, microbatch: Array) -> Array:
        """[B, T, D] a microbatch's embedding, the same on every stage."""
        batch = self.microbatches.at(microbatch)
        embedded = self.vocabulary.embed(self._table("embed_tokens"), batch.tokens)
        embedded = vary(scaled_embedding(self.model, embedded))
        if self.parameters.embed_positions is not None:
            rows = self._table("embed_positions")[batch.positions]
            embedded = embedded + rows.astype(embedded.dtype)
        return embedded

    def loss(self, microbatch: Array, x: Array, *, always: bool) -> Array:
        """[] the loss of the last stage's `x`; unless `always`, an IDLE microbatch has none."""
        return self._scored(microbatch, x, None, always).loss

    def score(
        self, microbatch: Array, x: Array, gradients: Tree, *, always: bool
    ) -> tuple[Scored, Tree]:
        """Score the last stage's `x`, and add the gradients of norm and head.

        Unless `always`, the microbatch may be IDLE, and then counts nothing.
        """
        start = self._gradient_start(gradients, self.head)
        scored = self._scored(microbatch, x, start, always)
        norm = self.zero.scatter(self.layouts.norm, scored.norm_gradients)
        gradients = with_fields(gradients, norm=_add(gradients.norm, norm))
        return scored, self._gradient_end(gradients, self.head, scored.head_gradient)

    def embed_backward(self, microbatch: Array, cotangent: Array, gradients: Tree) -> Tree:
        """Add the embedding's gradient, of the first stage's `cotangent`; IDLE adds nothing."""
        cotangent = first_stage_to_all(
            jnp.where(microbatch != IDLE, cotangent, jnp.zeros_like(cotangent)),
            self.vocabulary.residual_spec,
        )
        batch = self.microbatches.at(microbatch)
        if self.parameters.embed_positions is not None:
            positions = first_stage_to_all(batch.positions, P())
            start = self._gradient_start(gradients, "embed_positions")
            gradient = start.at[positions].add(cotangent.astype(start.dtype))
            gradients = self._gradient_end(gradients, "embed_positions", gradient)
        cotangent = scaled_embedding(self.model, cotangent)
        start = self._gradient_start(gradients, "embed_tokens")
        gradient = self.vocabulary.add_embed_gradient(start, batch.tokens, vary(cotangent))
        return self._gradient_end(gradients, "embed_tokens", gradient)

    def _scored(
        self, microbatch: Array, x: Array, head_gradient: Array | None, always: bool
    ) -> Scored:
        batch = self.microbatches.at(microbatch)
        weights = batch.weights
        if not always:
            weights = jnp.where(microbatch != IDLE, weights, jnp.zeros_like(weights))
        return self.vocabulary.score(
            self.zero.gather(self.layouts.norm, self.parameters.norm),
            self._table(self.head),
            last_stage_to_all(x, self.vocabulary.residual_spec),
            batch.labels,
            weights,
            head_gradient,
        )

    def _table(self, name: str) -> Array:
        layout_tree, parameter = getattr(self.layouts, name), getattr(self.parameters, name)
        return jax.tree.leaves(self.zero.gather(layout_tree, parameter))[0]

    def _gradient_start(self, gradients: Tree, name: str) -> Array:
        """What a table's gradient of this tick is added to: the total itself, where it is whole."""
        if self.zero.sums_each_microbatch:
            return jnp.zeros_like(self._table(name), self.zero.reduce_dtype)
        return jax.tree.leaves(getattr(gradients, name))[0]

    def _gradient_end(self, gradients: Tree, name: str, gradient: Array | None) -> Tree:
        total = getattr(gradients, name)
        update = jax.tree.unflatten(jax.tree.structure(total), [gradient])
        if self.zero.sums_each_microbatch:
            update = _add(total, self.zero.scatter(getattr(self.layouts, name), update))
        return with_fields(gradients, **{name: update})


def with_fields(model: Transformer, **fields: Any) -> Transformer:
    """A copy of the model's pytree with some fields replaced."""
    leaves, structure = jax.tree.flatten(model)
    copy = jax.tree.unflatten(structure, leaves)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy


def _add(total: Tree, update: Tree) -> Tree:
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, update)
