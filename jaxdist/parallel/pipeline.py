"""The pipeline executor: one `shard_map`, manual over dp and pp, that runs a schedule's table.

Flow of a tick: the first stage embeds (all stages together), every stage runs its forward slot,
all stages score the microbatch that the last stage has just forwarded, every stage runs its
backward slot, and a ring permute hands activations down and cotangents up. The loss is the sum of
cross entropies times `weight`, which enters as the cotangent of the last stage: microbatches, dp,
pp and fp16's loss scale are then one sum.

Shapes: M microbatches, B rows of a microbatch on this dp member, T tokens, D hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig
from jaxdist.models.remat import rematerialised
from jaxdist.models.transformer import Transformer
from jaxdist.ops.rope import rope_table
from jaxdist.parallel.collectives import all_gather, psum, reduce_scatter, ring_shift, vary
from jaxdist.parallel.context import training_context
from jaxdist.parallel.schedule import IDLE, Phase, Schedule, forward_only
from jaxdist.parallel.sharding import Layout, Rules, gradient_specs, layouts, only, parameter_specs
from jaxdist.parallel.stacks import read, write
from jaxdist.parallel.stage import Residuals, Stage
from jaxdist.parallel.vocabulary import (
    Scored,
    Vocabulary,
    first_stage_to_all,
    last_stage_to_all,
)

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Microbatches:
    """A global batch cut into microbatches; dp shards dim 1."""

    tokens: Array  # [M, B, T] int32
    labels: Array  # [M, B, T] int32
    weights: Array  # [M, B, T] fp32, what each token's cross entropy counts
    segment_ids: Array  # [M, B, T] int32, 0 = padding
    positions: Array  # [M, B, T] int32

    def at(self, index: Array) -> "Microbatches":
        """One microbatch, [B, T]; an IDLE index gives some microbatch, whose result is unused."""
        index = jnp.maximum(index, 0)
        return jax.tree.map(lambda a: read(a, index), self)


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


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A model on a mesh, trained by one schedule.

    `zero` decides what travels over dp and when: 0 one psum after the loop; 1 one reduce-scatter
    after the loop; 2 a reduce-scatter in each microbatch, accumulated as a shard; 3 parameters
    are shards too, gathered layer by layer.
    """

    model: ModelConfig
    parallel: ParallelConfig
    mesh: MeshShape
    schedule: Schedule
    compute_dtype: DTypeLike
    reduce_dtype: DTypeLike
    skip_bubbles: bool

    @cached_property
    def rules(self) -> Rules:
        return Rules.of(self.model, self.parallel, self.mesh)

    def loss_and_gradients(
        self, parameters: Transformer, microbatches: Microbatches
    ) -> tuple[Array, Transformer]:
        """Weighted loss summed over the global batch, and its gradient in the layout of ZeRO.

        Runs under `jax.set_mesh`; takes and gives logical (global) arrays.
        """
        tree = layouts(parameters, self.rules)
        zero = self.parallel.zero
        region = jax.shard_map(
            lambda p, m: _Region(self, tree, p, m).train(),
            axis_names={"dp", "pp"},
            in_specs=(_manual(parameter_specs(tree, zero)), P(None, "dp")),
            out_specs=(P(), _manual(gradient_specs(tree, zero))),
        )
        return region(parameters, microbatches)

    def loss(self, parameters: Transformer, microbatches: Microbatches) -> Array:
        """Weighted loss summed over the global batch, without gradients."""
        tree = layouts(parameters, self.rules)
        region = jax.shard_map(
            lambda p, m: _Region(self, tree, p, m).evaluate(),
            axis_names={"dp", "pp"},
            in_specs=(_manual(parameter_specs(tree, self.parallel.zero)), P(None, "dp")),
            out_specs=P(),
        )
        return region(parameters, microbatches)


class _Region:
    """The body of the `shard_map`: one (dp, pp) member's view; tp is the partitioner's."""

    def __init__(
        self, pipeline: Pipeline, tree: Tree, parameters: Transformer, microbatches: Microbatches
    ):
        self.pipeline = pipeline
        self.layouts = tree
        self.zero = pipeline.parallel.zero
        # The final norm is the same on every stage and its gradient is computed by all: dp only.
        norm = jax.tree.map(lambda a: vary(a, ("dp",)), parameters.norm)
        self.parameters = jax.tree.map(vary, parameters)
        self.norm = norm
        self.microbatches = jax.tree.map(vary, microbatches)
        self.index = lax.axis_index("pp")
        self.residual_spec = only(pipeline.rules.spec(("batch", "sequence", "embed")), "tp")
        rows = pipeline.model.padded_vocab_size // pipeline.mesh.pp
        self.vocabulary = Vocabulary(
            vocab_size=pipeline.model.vocab_size,
            rows_per_stage=rows,
            compute_dtype=pipeline.compute_dtype,
            masked=pipeline.mesh.tp > 1,
            residual_spec=self.residual_spec,
        )
        num_layers = pipeline.model.num_hidden_layers // pipeline.mesh.pp
        self.stage = Stage(
            layer=rematerialised(self._layer, pipeline.parallel.remat),
            parameters=self.parameters.layers,
            num_layers=num_layers,
            gather=partial(self._gather, tree.layers, layer=True),
            scatter=partial(self._scatter, tree.layers, layer=True),
        )

    def train(self) -> tuple[Array, Transformer]:
        schedule = self.pipeline.schedule
        carry = self._start(schedule)
        for phase in schedule.phases():
            carry = self._run(phase, partial(self._tick, schedule, phase), carry)
        return self._total(carry.loss), self._reduce(carry.gradients)

    def evaluate(self) -> Array:
        schedule = forward_only(self.pipeline.mesh.pp, self.microbatches.tokens.shape[0])
        x = self._empty_activation()
        carry = (vary(jnp.float32(0)), x)
        for phase in schedule.phases():
            carry = self._run(phase, partial(self._forward_tick, schedule, phase), carry)
        return self._total(carry[0])

    # -- ticks ------------------------------------------------------------------------------

    def _tick(self, schedule: Schedule, phase: Phase, tick: Array, carry: _Carry) -> _Carry:
        down, up = carry.activation, carry.cotangent
        forward = self._slot(schedule.forward, tick)
        backward = self._slot(schedule.backward, tick)
        slots = read(vary(jnp.asarray(schedule.residual_slots)), self.index)
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
            slot = read(slots, jnp.maximum(forward, 0))
            down, residuals = self.stage.forward(x, inputs, residuals, slot, self._trips(forward))
        if phase.has_score:
            scored, gradients = self._score(schedule, tick, down, gradients)
            loss += scored.loss
            if waiting is not None:
                place = read(jnp.asarray(schedule.score), tick)
                waiting = write(waiting, vary(scored.cotangent), place)
        if phase.has_backward:
            up = self._last_cotangent(up, scored, waiting, backward)
            inputs = self._inputs(self.microbatches.at(backward))
            slot = read(slots, jnp.maximum(backward, 0))
            up, layers = self.stage.backward(
                up, inputs, residuals, slot, self._trips(backward), gradients.layers
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
            loss += self._scored(schedule, tick, x, with_gradients=False).loss
        return loss, self._shift(x, +1)

    def _run(self, phase: Phase, tick: Callable[[Any, Any], Any], carry: Any) -> Any:
        if phase.stop - phase.start == 1:
            return tick(jnp.int32(phase.start), carry)
        return lax.fori_loop(phase.start, phase.stop, tick, carry)

    # -- the parts of a tick ------------------------------------------------------------------

    def _layer(self, block: Any, x: Array, inputs: Tree) -> Array:
        rope, segment_ids = inputs
        pipeline = self.pipeline
        ctx = training_context(
            pipeline.model, pipeline.rules, pipeline.mesh, segment_ids, pipeline.compute_dtype
        )
        return block(x, rope, ctx)[0]

    def _inputs(self, microbatch: Microbatches) -> Tree:
        return rope_table(self.pipeline.model, microbatch.positions), microbatch.segment_ids

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
        return jnp.where(self.index == 0, vary(embedded), arrived)

    def _scored(self, schedule: Schedule, tick: Array, x: Array, with_gradients: bool) -> Scored:
        microbatch = self.microbatches.at(read(jnp.asarray(schedule.score), tick))
        norm = self._gather(self.layouts.norm, self.norm)
        return self.vocabulary.score(
            norm,
            self._gather_leaf(self._head_name),
            last_stage_to_all(x, self.residual_spec),
            microbatch.labels,
            microbatch.weights,
            with_gradients,
        )

    def _score(
        self, schedule: Schedule, tick: Array, x: Array, gradients: Tree
    ) -> tuple[Scored, Tree]:
        scored = self._scored(schedule, tick, x, with_gradients=True)
        norm = self._scatter(self.layouts.norm, scored.norm_gradients)
        gradients = _with(gradients, norm=_add(gradients.norm, norm))
        return scored, self._add_leaf(gradients, self._head_name, scored.head_gradient)

    def _last_cotangent(
        self, arrived: Array, scored: Scored | None, waiting: Array | None, backward: Array
    ) -> Array:
        if waiting is not None:
            own = read(waiting, jnp.maximum(backward, 0))
        elif scored is not None:
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
        tokens = self.microbatches.at(backward).tokens
        gradient = self.vocabulary.embed_gradient(
            self._gather_leaf("embed_tokens"), tokens, vary(cotangent)
        )
        return self._add_leaf(gradients, "embed_tokens", gradient)

    def _shift(self, x: Array, by: int) -> Array:
        return ring_shift(x, "pp", by, self.residual_spec)

    # -- dp: ZeRO -----------------------------------------------------------------------------

    @property
    def _head_name(self) -> str:
        return "embed_tokens" if self.parameters.lm_head is None else "lm_head"

    def _gather(self, layout_tree: Tree, parameters: Tree, layer: bool = False) -> Tree:
        """Whole parameters from dp's shards (ZeRO-3). Matrices travel in the compute dtype; the
        way back to the master's dtype cancels against the cast inside `ops.dot`."""
        if self.zero < 3:
            return parameters

        def one(layout: Layout, a: Array) -> Array:
            dim, spec = _local(layout, layer)
            if dim is None:
                return a
            wire = a.astype(self.pipeline.compute_dtype) if a.ndim >= 2 else a
            return all_gather(wire, "dp", dim, spec).astype(a.dtype)

        return jax.tree.map(one, layout_tree, parameters)

    def _scatter(self, layout_tree: Tree, gradients: Tree, layer: bool = False) -> Tree:
        """Gradients summed over dp and cut to the shard, in each microbatch (ZeRO-2 and 3)."""
        if self.zero < 2:
            return gradients

        def one(layout: Layout, g: Array) -> Array:
            dim, spec = _local(layout, layer)
            g = g.astype(self.pipeline.reduce_dtype)
            return g if dim is None else reduce_scatter(g, "dp", dim, spec)

        return jax.tree.map(one, layout_tree, gradients)

    def _reduce(self, gradients: Transformer) -> Transformer:
        """The one reduction over dp after the loop: what no microbatch has summed yet."""

        def one(layout: Layout, g: Array) -> Array:
            dim, spec = _local(layout, layer=False)
            if dim is None or self.zero == 0:
                return psum(g, "dp", spec)
            return reduce_scatter(g, "dp", dim, spec) if self.zero == 1 else g

        return jax.tree.map(one, self.layouts, gradients)

    def _gather_leaf(self, name: str) -> Array:
        layout_tree, parameter = getattr(self.layouts, name), getattr(self.parameters, name)
        return jax.tree.leaves(self._gather(layout_tree, parameter))[0]

    def _add_leaf(self, gradients: Tree, name: str, gradient: Array | None) -> Tree:
        total = getattr(gradients, name)
        gradient = jax.tree.unflatten(jax.tree.structure(total), [gradient])
        gradient = self._scatter(getattr(self.layouts, name), gradient)
        return _with(gradients, **{name: _add(total, gradient)})

    # -- start and end --------------------------------------------------------------------------

    def _start(self, schedule: Schedule) -> _Carry:
        x = self._empty_activation()
        microbatch = self.microbatches.at(jnp.int32(0))
        residuals = self.stage.empty_residuals(
            x, self._inputs(microbatch), schedule.num_residual_slots
        )
        waiting = None
        if schedule.waits_for_backward:
            waiting = vary(jnp.zeros((schedule.num_microbatches, *x.shape), x.dtype))
        return _Carry(
            loss=vary(jnp.float32(0)),
            activation=x,
            cotangent=x,
            waiting=waiting,
            residuals=residuals,
            gradients=self._empty_gradients(),
        )

    def _empty_activation(self) -> Array:
        _, rows, length = self.microbatches.tokens.shape
        shape = (rows, length, self.pipeline.model.hidden_size)
        x = vary(jnp.zeros(shape, self.pipeline.compute_dtype))
        return lax.with_sharding_constraint(x, self.residual_spec)

    def _empty_gradients(self) -> Transformer:
        """Accumulators: whole for ZeRO-0 and 1, shards (cut from the parameters) for 2 and 3."""

        def one(layout: Layout, a: Array) -> Array:
            shape = list(a.shape)
            if self.zero == 2 and layout.dp_dim is not None:
                shape[layout.dp_dim] //= self.pipeline.mesh.dp
            zeros = vary(jnp.zeros(shape, self.pipeline.reduce_dtype), tuple(_axes_of(a)))
            return lax.with_sharding_constraint(zeros, only(layout.spec, "tp"))

        parameters = _with(self.parameters, norm=self.norm)
        return jax.tree.map(one, self.layouts, parameters)

    def _total(self, loss: Array) -> Array:
        return lax.psum(loss, ("dp", "pp"))


def _local(layout: Layout, layer: bool) -> tuple[int | None, P]:
    """dp's dim and the tp spec of a parameter, or of one layer of a stack."""
    spec = only(layout.spec, "tp")
    if not layer:
        return layout.dp_dim, spec
    return None if layout.dp_dim is None else layout.dp_dim - 1, P(*spec[1:])


def _manual(specs: Tree) -> Tree:
    return jax.tree.map(lambda spec: only(spec, "dp", "pp"), specs)


def _axes_of(a: Array) -> frozenset[str]:
    return jax.typeof(a).manual_axis_type.varying


def _add(total: Tree, update: Tree) -> Tree:
    return jax.tree.map(lambda t, u: t + u.astype(t.dtype), total, update)


def _with(model: Transformer, **fields: Any) -> Transformer:
    """A copy of the model's pytree with some fields replaced."""
    leaves, structure = jax.tree.flatten(model)
    copy = jax.tree.unflatten(structure, leaves)
    for name, value in fields.items():
        setattr(copy, name, value)
    return copy
