"""The executor: the body of the pipeline's `shard_map`, one (dp, pp) member's view of a step.

Flow of a tick: the first stage embeds (all stages together), every stage runs its forward slot,
all stages score the microbatch that the last stage has just forwarded, every stage runs its
backward slot, and a ring permute hands activations down and cotangents up.

Shapes: M microbatches, B rows of a microbatch on this dp member, T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from jaxdist.models.moe import balancing_loss
from jaxdist.models.remat import rematerialised
from jaxdist.models.transformer import Transformer, scaled_embedding
from jaxdist.ops.rope import layer_rope, rope_table
from jaxdist.parallel.collectives import ring_shift, vary
from jaxdist.parallel.context import training_context
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.parallel.schedule import IDLE, Phase, Schedule, forward_only
from jaxdist.parallel.sharding import only
from jaxdist.parallel.stacks import read, write
from jaxdist.parallel.stage import Residuals, Stage
from jaxdist.parallel.vocabulary import (
    Scored,
    Vocabulary,
    first_stage_to_all,
    last_stage_to_all,
)
from jaxdist.parallel.zero import Zero

if TYPE_CHECKING:
    from jaxdist.parallel.pipeline import Pipeline

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Carry:
    """What goes from tick to tick."""

    loss: Array  # [] of this stage
    activation: Array  # [B, T, D] arrived from the stage before
    cotangent: Array  # [B, T, D] arrived from the stage after
    waiting: Array | None  # [M, B, T, D] scored cotangents whose backward comes later
    residuals: Residuals
    gradients: Tree


class Executor:
    """Runs a schedule on one member's parameters and rows; tp is the partitioner's."""

    def __init__(
        self, pipeline: Pipeline, tree: Tree, parameters: Transformer, microbatches: Microbatches
    ):
        self.pipeline = pipeline
        self.layouts = tree
        self.zero = Zero(
            stage=pipeline.parallel.zero,
            dp=pipeline.mesh.dp,
            compute_dtype=pipeline.compute_dtype,
            reduce_dtype=pipeline.reduce_dtype,
        )
        # What lies beside stacks and tables is the same on every stage, and so is its gradient,
        # which all of them compute: it varies over dp only.
        alike = {
            name: jax.tree.map(lambda a: vary(a, ("dp",)), getattr(parameters, name))
            for name in ("norm", "embed_positions")
        }
        self.parameters = _with(jax.tree.map(vary, parameters), **alike)
        self.norm = self.parameters.norm
        self.microbatches = jax.tree.map(vary, microbatches)
        self.index = lax.axis_index("pp")
        self.residual_spec = only(pipeline.rules.spec(("batch", "sequence", "embed")), "tp")
        self.vocabulary = Vocabulary(
            vocab_size=pipeline.model.vocab_size,
            compute_dtype=pipeline.compute_dtype,
            residual_spec=self.residual_spec,
            softcap=pipeline.model.final_logit_softcapping,
        )
        num_layers = pipeline.model.num_hidden_layers // pipeline.mesh.pp
        self.stage = Stage(
            layer=rematerialised(self._layer, pipeline.parallel.remat),
            has_loss=pipeline.model.num_experts > 0,
            parameters=self.parameters.layers,
            numbers=self.index * num_layers + vary(jnp.arange(num_layers, dtype=jnp.int32)),
            select=self._layer_inputs,
            num_layers=num_layers,
            gather=partial(self.zero.gather, tree.layers, layer=True),
            scatter=partial(self.zero.scatter, tree.layers, layer=True),
        )

    def train(self) -> tuple[Array, Transformer]:
        """Loss summed over all members, and gradients in the layout of the ZeRO stage."""
        schedule = self.pipeline.schedule
        carry = self._start(schedule)
        for phase in schedule.phases():
            carry = self._run(phase, partial(self._tick, schedule, phase), carry)
        return self._total(carry.loss), self.zero.reduce(self.layouts, carry.gradients)

    def evaluate(self) -> Array:
        """Loss summed over all members."""
        schedule = forward_only(self.pipeline.mesh.pp, self.microbatches.tokens.shape[0])
        x = self._empty_activation()
        carry = (vary(jnp.float32(0)), x)
        for phase in schedule.phases():
            carry = self._run(phase, partial(self._forward_tick, schedule, phase), carry)
        return self._total(carry[0])

    def empty_residuals(self) -> Residuals:
        """The rings of saved activations, before the first forward."""
        inputs = self._inputs(self.microbatches.at(jnp.int32(0)))
        slots = self.pipeline.schedule.num_residual_slots
        return self.stage.empty_residuals(self._empty_activation(), inputs, slots)

    def _tick(self, schedule: Schedule, phase: Phase, tick: Array, carry: _Carry) -> _Carry:
        down, up = carry.activation, carry.cotangent
        forward = self._slot(schedule.forward, tick)
        backward = self._slot(schedule.backward, tick)
        residuals, gradients, loss, waiting = (
            carry.residuals,
            carry.gradients,
            carry.loss,
            carry.waiting,
        )
        scored = None
        if phase.has_forward:
            x = self._first_input(schedule, tick, down)
            inputs = self._inputs(self.microbatches.at(forward))
            slot = self._slot(schedule.forward_slots, tick)
            down, own_loss, residuals = self.stage.forward(
                x, inputs, residuals, slot, self._trips(forward)
            )
            if own_loss is not None:
                loss += jnp.where(forward != IDLE, own_loss, 0.0)
        if phase.has_score:
            scored, gradients = self._score(schedule, tick, down, gradients)
            loss += scored.loss
            if waiting is not None and scored.cotangent is not None:
                place = read(jnp.asarray(schedule.score), tick)
                waiting = write(waiting, vary(scored.cotangent), place)
        if phase.has_backward:
            up = self._last_cotangent(up, scored, waiting, backward)
            if not self.pipeline.skip_bubbles:
                # A backward is linear in its cotangent, so that an empty slot adds nothing.
                up = jnp.where(backward != IDLE, up, jnp.zeros_like(up))
            inputs = self._inputs(self.microbatches.at(backward))
            slot = self._slot(schedule.backward_slots, tick)
            up, layers = self.stage.backward(
                up,
                inputs,
                residuals,
                slot,
                self._trips(backward),
                gradients.layers,
                jnp.where(backward != IDLE, 1.0, 0.0),
            )
            gradients = _with(gradients, layers=layers)
            gradients = self._embed_backward(schedule, tick, up, gradients)
        return _Carry(
            loss=loss,
            activation=self._shift(down, +1) if phase.has_forward else down,
            cotangent=self._shift(up, -1) if phase.has_backward else up,
            waiting=waiting,
            residuals=residuals,
            gradients=gradients,
        )

    def _forward_tick(
        self, schedule: Schedule, phase: Phase, tick: Array, carry: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        loss, x = carry
        forward = self._slot(schedule.forward, tick)
        inputs = self._inputs(self.microbatches.at(forward))
        x = self._first_input(schedule, tick, x)
        x = self.stage.forward_only(x, inputs, self._trips(forward))
        if phase.has_score:
            loss += self._scored(schedule, tick, x, None).loss
        return loss, self._shift(x, +1)

    def _run(self, phase: Phase, tick: Callable[[Any, Any], Any], carry: Any) -> Any:
        if phase.stop - phase.start == 1:
            return tick(jnp.int32(phase.start), carry)
        return lax.fori_loop(phase.start, phase.stop, tick, carry)

    def _layer(self, block: Any, x: Array, inputs: Tree) -> tuple[Array, Array | None]:
        """One layer, and what its router adds to the loss; None where it has no router."""
        rope, segment_ids, weights, is_local = inputs
        pipeline = self.pipeline
        ctx = training_context(
            pipeline.model, pipeline.rules, pipeline.mesh, segment_ids, pipeline.compute_dtype
        )
        x, _, router = block.with_router(x, rope, ctx, None, is_local)
        if router is None:
            return x, None
        return x, balancing_loss(pipeline.model, router, weights)

    def _inputs(self, microbatch: Microbatches) -> Tree:
        weights = microbatch.weights if self.pipeline.model.num_experts else None
        rope = rope_table(self.pipeline.model, microbatch.positions)
        return rope, microbatch.segment_ids, weights

    def _layer_inputs(self, inputs: Tree, number: Array) -> Tree:
        """A microbatch's inputs as layer `number` takes them: its RoPE, whether it is local."""
        model = self.pipeline.model
        if model.sliding_window_pattern is None:
            return (*inputs, None)
        local = [model.is_local(layer) for layer in range(model.num_hidden_layers)]
        is_local = read(vary(jnp.array(local)), number)
        rope, *rest = inputs
        return (layer_rope(rope, is_local), *rest, is_local)

    def _slot(self, table: Any, tick: Array) -> Array:
        return read(vary(jnp.asarray(table)), tick, self.index)

    def _trips(self, microbatch: Array) -> Array | int:
        """Layers to run: all of them, or none in a bubble (which else computes garbage)."""
        if self.pipeline.mesh.pp == 1 or not self.pipeline.skip_bubbles:
            return self.stage.num_layers
        return jnp.where(microbatch != IDLE, self.stage.num_layers, 0)

    def _first_input(self, schedule: Schedule, tick: Array, arrived: Array) -> Array:
        microbatch = self.microbatches.at(read(jnp.asarray(schedule.forward), tick, 0))
        table = self._gather_leaf("embed_tokens")
        embedded = self.vocabulary.embed(table, microbatch.tokens)
        embedded = scaled_embedding(self.pipeline.model, embedded)
        if self.parameters.embed_positions is not None:
            rows = self._gather_leaf("embed_positions")[microbatch.positions]
            embedded = vary(embedded) + rows.astype(embedded.dtype)
        return jnp.where(self.index == 0, vary(embedded), arrived)

    def _scored(
        self, schedule: Schedule, tick: Array, x: Array, head_gradient: Array | None
    ) -> Scored:
        microbatch = self.microbatches.at(read(jnp.asarray(schedule.score), tick))
        norm = self.zero.gather(self.layouts.norm, self.norm)
        return self.vocabulary.score(
            norm,
            self._gather_leaf(self._head_name),
            last_stage_to_all(x, self.residual_spec),
            microbatch.labels,
            microbatch.weights,
            head_gradient,
        )

    def _score(
        self, schedule: Schedule, tick: Array, x: Array, gradients: Tree
    ) -> tuple[Scored, Tree]:
        start = self._gradient_start(gradients, self._head_name)
        scored = self._scored(schedule, tick, x, start)
        norm = self.zero.scatter(self.layouts.norm, scored.norm_gradients)
        gradients = _with(gradients, norm=_add(gradients.norm, norm))
        return scored, self._gradient_end(gradients, self._head_name, scored.head_gradient)

    def _last_cotangent(
        self, arrived: Array, scored: Scored | None, waiting: Array | None, backward: Array
    ) -> Array:
        if waiting is not None:
            own = read(waiting, jnp.maximum(backward, 0))
        elif scored is not None and scored.cotangent is not None:
            own = vary(scored.cotangent)
        else:
            return arrived  # the last stage has no backward in this phase
        return jnp.where(self.index == self.pipeline.mesh.pp - 1, own, arrived)

    def _embed_backward(
        self, schedule: Schedule, tick: Array, cotangent: Array, gradients: Tree
    ) -> Tree:
        backward = read(jnp.asarray(schedule.backward), tick, 0)
        cotangent = first_stage_to_all(
            jnp.where(backward != IDLE, cotangent, jnp.zeros_like(cotangent)), self.residual_spec
        )
        microbatch = self.microbatches.at(backward)
        if self.parameters.embed_positions is not None:
            positions = first_stage_to_all(microbatch.positions, P())
            start = self._gradient_start(gradients, "embed_positions")
            gradient = start.at[positions].add(cotangent.astype(start.dtype))
            gradients = self._gradient_end(gradients, "embed_positions", gradient)
        cotangent = scaled_embedding(self.pipeline.model, cotangent)
        tokens = microbatch.tokens
        start = self._gradient_start(gradients, "embed_tokens")
        gradient = self.vocabulary.add_embed_gradient(start, tokens, vary(cotangent))
        return self._gradient_end(gradients, "embed_tokens", gradient)

    def _shift(self, x: Array, by: int) -> Array:
        return ring_shift(x, "pp", by, self.residual_spec)

    @property
    def _head_name(self) -> str:
        return "embed_tokens" if self.parameters.lm_head is None else "lm_head"

    def _gather_leaf(self, name: str) -> Array:
        layout_tree, parameter = getattr(self.layouts, name), getattr(self.parameters, name)
        return jax.tree.leaves(self.zero.gather(layout_tree, parameter))[0]

    def _gradient_start(self, gradients: Tree, name: str) -> Array:
        """What a table's gradient of this tick is added to: the total itself, where it is whole."""
        if self.zero.sums_each_microbatch:
            return jnp.zeros_like(self._gather_leaf(name), self.pipeline.reduce_dtype)
        return jax.tree.leaves(getattr(gradients, name))[0]

    def _gradient_end(self, gradients: Tree, name: str, gradient: Array | None) -> Tree:
        total = getattr(gradients, name)
        update = jax.tree.unflatten(jax.tree.structure(total), [gradient])
        if self.zero.sums_each_microbatch:
            update = _add(total, self.zero.scatter(getattr(self.layouts, name), update))
        return _with(gradients, **{name: update})

    def _start(self, schedule: Schedule) -> _Carry:
        x = self._empty_activation()
        waiting = None
        if schedule.waits_for_backward:
            waiting = vary(jnp.zeros((schedule.num_microbatches, *x.shape), x.dtype))
        return _Carry(
            loss=vary(jnp.float32(0)),
            activation=x,
            cotangent=x,
            waiting=waiting,
            residuals=self.empty_residuals(),
            gradients=self.zero.accumulators(self.layouts, self.parameters),
        )

    def _empty_activation(self) -> Array:
        _, rows, length = self.microbatches.tokens.shape
        shape = (rows, length, self.pipeline.model.hidden_size)
        x = vary(jnp.zeros(shape, self.pipeline.compute_dtype))
        return lax.with_sharding_constraint(x, self.residual_spec)

    def _total(self, loss: Array) -> Array:
        return lax.psum(loss, ("dp", "pp"))


def _add(total: Tree, update: Tree) -> Tree:
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, update)


def _with(model: Transformer, **fields: Any) -> Transformer:
    """A copy of the model's pytree with some fields replaced."""
    leaves, structure = jax.tree.flatten(model)
    copy = jax.tree.unflatten(structure, leaves)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy
