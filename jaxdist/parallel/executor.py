"""The executor: the body of the pipeline's `shard_map`, one (dp, pp) member's view of a step.

It runs a schedule's loops of ticks (`tick.py`) over this member's stage and its slices of embedding
and head.

Shapes: M microbatches, B rows of a microbatch on this dp member, T tokens, D hidden size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxdist.models.moe import balancing_loss
from jaxdist.models.remat import rematerialised
from jaxdist.models.transformer import Transformer
from jaxdist.ops.rope import layer_rope, rope_table
from jaxdist.ops.stacks import read
from jaxdist.parallel.collectives import vary
from jaxdist.parallel.context import training_context
from jaxdist.parallel.ends import Ends, with_fields
from jaxdist.parallel.microbatches import Microbatches
from jaxdist.parallel.schedules.named import forward_only
from jaxdist.parallel.schedules.phases import Loop
from jaxdist.parallel.schedules.rings import Ring
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.parallel.sharding import only
from jaxdist.parallel.stage import Rings, Stage
from jaxdist.parallel.tick import Carry, Tick, present
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.parallel.zero import Zero

if TYPE_CHECKING:
    from jaxdist.parallel.pipeline import Pipeline

Tree = Any


class Executor:
    """Runs a schedule on one member's parameters and rows; tp is the partitioner's."""

    def __init__(
        self, pipeline: Pipeline, tree: Tree, parameters: Transformer, microbatches: Microbatches
    ):
        self.pipeline = pipeline
        self.skip_bubbles = pipeline.skip_bubbles
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
        self.parameters = with_fields(jax.tree.map(vary, parameters), **alike)
        self.microbatches = jax.tree.map(vary, microbatches)
        self.index = lax.axis_index("pp")
        self.residual_spec = only(pipeline.rules.spec(("batch", "sequence", "embed")), "tp")
        vocabulary = Vocabulary(
            vocab_size=pipeline.model.vocab_size,
            compute_dtype=pipeline.compute_dtype,
            residual_spec=self.residual_spec,
            softcap=pipeline.model.final_logit_softcapping,
        )
        self.ends = Ends(
            pipeline.model, vocabulary, self.zero, tree, self.parameters, self.microbatches
        )
        self.layers = pipeline.layers
        numbers = self.layers.rows.reshape(self.layers.num_stages, -1)
        layer_layouts = jax.tree.leaves(tree.layers)
        self.stage = Stage(
            layer=rematerialised(self._layer, pipeline.parallel.remat),
            has_loss=pipeline.model.num_experts > 0,
            parameters=self.parameters.layers,
            numbers=read(vary(jnp.asarray(np.maximum(numbers, 0), jnp.int32)), self.index),
            select=self._layer_inputs,
            num_rows=self.layers.most,
            offload=pipeline.parallel.offload_activations,
            gather=partial(self.zero.gather_wire, tree.layers, layer=True),
            scatter=lambda found: self.zero.scatter(
                {place: layer_layouts[place] for place in found}, found, layer=True
            ),
        )

    def train(self) -> tuple[Array, Transformer]:
        """Loss summed over all members, and gradients in the layout of the ZeRO stage."""
        schedule = self.pipeline.schedule
        carry = self._start(
            schedule,
            residuals=self.empty_residuals(),
            taps=self.empty_taps(),
            gradients=self.zero.accumulators(self.layouts, self.parameters),
        )
        carry = self._run(schedule, carry)
        gradients = carry.gradients
        if schedule.lead:
            last = jnp.int32(schedule.embed_backward[-1])
            gradients = self.ends.embed_backward(last, present(carry.leaving), gradients)
        return self._total(carry.loss), self.zero.reduce(self.layouts, gradients)

    def evaluate(self) -> Array:
        """Loss summed over all members."""
        count = self.microbatches.tokens.shape[0]
        schedule = forward_only(self.layers.num_stages, count, self.layers.num_chunks)
        return self._total(self._run(schedule, self._start(schedule)).loss)

    def empty_residuals(self) -> Rings:
        """The rings of saved activations, before the first forward."""
        slots = self.pipeline.schedule.residuals.size
        return self.stage.empty_residuals(self._empty_activation(), self.inputs(0), slots)

    def empty_taps(self) -> Rings:
        """The rings of what weight gradients wait for; none where backwards make them."""
        taps = self.pipeline.schedule.taps
        if taps is None:
            return []
        return self.stage.empty_taps(self._empty_activation(), self.inputs(0), taps.size)

    def inputs(self, microbatch: Array | int) -> Tree:
        """What all layers are given with a microbatch."""
        own, model = self.microbatches.at(jnp.asarray(microbatch, jnp.int32)), self.pipeline.model
        weights = own.weights if model.num_experts else None
        return rope_table(model, own.positions), own.segment_ids, weights

    def _run(self, schedule: Schedule, carry: Carry) -> Carry:
        for loop in schedule.loops:
            carry = self._turns(schedule, loop, carry)
        return carry

    def _turns(self, schedule: Schedule, loop: Loop, carry: Carry) -> Carry:
        def turn(number: Array | int, carry: Carry) -> Carry:
            for phase in loop.phases:
                start, length = phase.start + number * loop.period, phase.stop - phase.start

                def tick(index: Array | int, carry: Carry, phase=phase, start=start) -> Carry:
                    return Tick(self, schedule, phase, jnp.int32(start + index), carry).run()

                carry = tick(0, carry) if length == 1 else lax.fori_loop(0, length, tick, carry)
            return carry

        return turn(0, carry) if loop.count == 1 else lax.fori_loop(0, loop.count, turn, carry)

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

    def _layer_inputs(self, inputs: Tree, number: Array) -> Tree:
        """A microbatch's inputs as layer `number` takes them: its RoPE, whether it is local."""
        model = self.pipeline.model
        if model.sliding_window_pattern is None:
            return (*inputs, None)
        local = [model.is_local(layer) for layer in range(model.num_hidden_layers)]
        is_local = read(vary(jnp.array(local)), number)
        rope, *rest = inputs
        return (layer_rope(rope, is_local), *rest, is_local)

    def _start(
        self,
        schedule: Schedule,
        residuals: Rings | None = None,
        taps: Rings | None = None,
        gradients: Tree = None,
    ) -> Carry:
        """The carry before the first tick; without gradients that of an evaluation."""
        x = self._empty_activation()
        trains = gradients is not None

        def ring(of: Ring | None) -> Array | None:
            return None if of is None else vary(jnp.zeros((of.size, *x.shape), x.dtype))

        return Carry(
            loss=vary(jnp.float32(0)),
            activation=x,
            cotangent=x if trains else None,
            down_inbox=ring(schedule.down_inbox),
            up_inbox=ring(schedule.up_inbox) if trains else None,
            embedded=self.ends.embed(jnp.int32(schedule.embed[0])) if schedule.lead else None,
            leaving=x if trains and schedule.lead else None,
            waiting=ring(schedule.waiting) if trains else None,
            residuals=residuals or [],
            taps=taps or [],
            gradients=gradients,
            ready_forward=self._first_ready(schedule, "forward") if trains else None,
            ready_backward=self._first_ready(schedule, "backward") if trains else None,
        )

    def first_rows(self, schedule: Schedule, kind: str) -> np.ndarray:
        """[ticks + 1, stages] the row with which the first busy slot from a tick on begins."""
        entries = schedule.following(schedule.forward if kind == "forward" else schedule.backward)
        chunk, most = schedule.chunk(entries), self.layers.most
        if kind == "forward":
            return chunk * most
        trips = self.layers.table[chunk, np.arange(schedule.num_stages)]
        return chunk * most + (trips if self.skip_bubbles else most) - 1

    def _first_ready(self, schedule: Schedule, kind: str) -> Tree:
        """The layer of the first slot, gathered ahead; None where nothing is gathered."""
        if not self.zero.gathers:
            return None
        rows = self.first_rows(schedule, kind)[0]
        return self.stage.made_ready(read(vary(jnp.asarray(rows, jnp.int32)), self.index))

    def _empty_activation(self) -> Array:
        _, rows, length = self.microbatches.tokens.shape
        shape = (rows, length, self.pipeline.model.hidden_size)
        x = vary(jnp.zeros(shape, self.pipeline.compute_dtype))
        return lax.with_sharding_constraint(x, self.residual_spec)

    def _total(self, loss: Array) -> Array:
        return lax.psum(loss, ("dp", "pp"))
