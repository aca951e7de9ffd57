"""The layers of one pipeline stage, forward and backward, with the residuals kept by hand.

Autodiff sees one layer at a time: `jax.vjp` of a layer gives its output and the leaves of its
vjp closure. Leaves that are inputs again (the layer's parameters, RoPE tables, segment ids) are
told by identity and dropped; the rest go into a ring, from which the backward rebuilds the
closure. What a leaf is, is the remat policy's choice: everything, the layer's input alone, or
some names between. Loops, collectives and gradient accumulation thus stay outside of autodiff.

Shapes: L rows of this stage's stack, K rows of a stretch, R ring slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdist.ops.stacks import as_bits, bits_dtype, from_bits, read, write
from jaxdist.parallel.collectives import vary
from jaxdist.parallel.split import Split, split_backward

Tree = Any
# (one layer's parameters, x, its inputs) -> x, its own loss [] or None
Layer = Callable[[Tree, Array, Tree], tuple[Array, Array | None]]
Rings = list[Array]  # each [R, K, ...]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one slot of a tick does: a stretch of layers, and its place in the rings.

    In an empty slot nothing runs, or layers run whose results are dropped: a backward is linear in
    its cotangents, which the caller makes zero.
    """

    first: Array | int  # row of the stretch's first layer
    trips: Array | int  # K, or how many layers to run of it
    live: Array | int | None = None  # of the trips those that have a layer; None: all
    slot: Array | int  # of the residuals' rings
    then: Array | int = 0  # row that the next slot of this kind begins with


@dataclass(frozen=True)
class _Closure:
    """Static half of a layer's vjp closure.

    Its tree, which leaves are inputs (by position), and the shapes of the others.
    """

    tree: Any
    known: list[int | None]
    saved: list[jax.ShapeDtypeStruct]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Runs a stage's layers; `parameters` is the stack [L, ...], whole or sharded over dp.

    `gather` makes one layer's parameters whole (ZeRO-3), as they travel. It runs one layer ahead of
    the one at work, so that neither waits for the other: what is `ready` goes from layer to layer
    and from tick to tick; None where nothing is gathered. `scatter` takes gradients of one layer's
    leaves, by their place, to the shape of the accumulator (ZeRO-2 and 3: summed over dp and cut
    to the shard).

    `select` takes a microbatch's inputs and a layer's number in the model to that layer's inputs.
    It runs outside of autodiff, so what it makes is made again in the backward, not kept.
    `numbers` goes with the stack: entry i is the number of the layer in parameters[i].
    """

    layer: Layer
    has_loss: bool  # whether layers have a loss of their own, added to the model's
    parameters: Tree
    numbers: Array  # [L] int32
    select: Callable[[Tree, Array], Tree]
    num_rows: int  # K
    offload: bool  # whether residuals lie in the host's memory
    gather: Callable[[Tree], Tree]
    scatter: Callable[[dict[int, Array]], dict[int, Array]]
    # Layers differ in numbers only: one trace, by the types of its arguments, serves every tick.
    _closures: dict[Any, _Closure] = field(default_factory=dict, init=False, repr=False)

    def forward(
        self, x: Array, inputs: Tree, residuals: Rings, work: Work, ready: Tree = None
    ) -> tuple[Array, Array | None, Rings, Tree]:
        """Apply the layers of `work`, saving into its slot.

        Returns x, the sum of the layers' own losses (None where they have none), the rings, and
        what is ready for the next slot.
        """

        def body(
            index: Array, carry: tuple[Array, Array | None, Rings, Tree]
        ) -> tuple[Array, Array | None, Rings, Tree]:
            x, loss, residuals, ready = carry
            row = work.first + index
            upcoming = jnp.where(index + 1 < work.trips, row + 1, work.then)
            parameters, ready = self._whole(row, ready, upcoming)
            (y, own), saved, _ = self._linearize(parameters, x, self._inputs(inputs, row))
            residuals = _put(residuals, self._sent(saved), work.slot, index)
            if work.live is not None:
                is_live = index < work.live
                y = jnp.where(is_live, y, x)
                own = jax.tree.map(lambda own: jnp.where(is_live, own, 0.0), own)
            return y, jax.tree.map(jnp.add, loss, own), residuals, ready

        loss = vary(jnp.float32(0)) if self.has_loss else None
        return lax.fori_loop(0, work.trips, body, (x, loss, residuals, ready))

    def forward_only(self, x: Array, inputs: Tree, work: Work) -> Array:
        """Apply the layers of `work` and save nothing."""

        def body(index: Array, x: Array) -> Array:
            row = work.first + index
            y = self.layer(self._at(row), x, self._inputs(inputs, row))[0]
            return y if work.live is None else jnp.where(index < work.live, y, x)

        return lax.fori_loop(0, work.trips, body, x)

    def backward(
        self,
        cotangent: Array,
        inputs: Tree,
        residuals: Rings,
        work: Work,
        gradients: Tree,
        loss_cotangent: Array | float = 1.0,
        ready: Tree = None,
    ) -> tuple[Array, Tree, Tree]:
        """Take `cotangent` back through the layers of `work`, adding to `gradients`.

        `loss_cotangent` is that of each layer's own loss. Returns the cotangent of the stretch's
        input, the gradients, and what is ready for the next slot.
        """
        closure = self._closure(cotangent, inputs)

        def body(step: Array, carry: tuple[Array, Tree, Tree]) -> tuple[Array, Tree, Tree]:
            cotangent, gradients, ready = carry
            index = work.trips - 1 - step
            row, cotangents = work.first + index, self._cotangents(cotangent, loss_cotangent)
            parameters, ready = self._whole(row, ready, self._before(work, index))
            known = self._known(closure, parameters, inputs, residuals, work, index)
            given = self._masked(cotangents, work, index)
            layer_gradients, dx = _pull(closure, known, given, self.has_loss)
            gradients = self._add(gradients, dict(enumerate(layer_gradients)), row)
            return self._passed(dx, cotangent, work, index), gradients, ready

        return lax.fori_loop(0, work.trips, body, (cotangent, gradients, ready))

    def backward_input(
        self,
        cotangent: Array,
        inputs: Tree,
        residuals: Rings,
        taps: Rings,
        tap_slot: Array,
        work: Work,
        gradients: Tree,
        loss_cotangent: Array | float = 1.0,
        ready: Tree = None,
    ) -> tuple[Array, Rings, Tree, Tree]:
        """`backward` without the gradients of matrices, for which it leaves taps in `tap_slot`."""
        closure = self._closure(cotangent, inputs)

        def body(
            step: Array, carry: tuple[Array, Rings, Tree, Tree]
        ) -> tuple[Array, Rings, Tree, Tree]:
            cotangent, taps, gradients, ready = carry
            index = work.trips - 1 - step
            row, cotangents = work.first + index, self._cotangents(cotangent, loss_cotangent)
            parameters, ready = self._whole(row, ready, self._before(work, index))
            known = self._known(closure, parameters, inputs, residuals, work, index)
            given = self._masked(cotangents, work, index)
            split = self._split(closure, known, given)
            dx, early, tapped = split.early(known, given)
            places = [place for place, late in enumerate(split.is_late) if not late]
            gradients = self._add(gradients, dict(zip(places, early, strict=True)), row)
            taps = _put(taps, tapped, tap_slot, index)
            return self._passed(dx, cotangent, work, index), taps, gradients, ready

        return lax.fori_loop(0, work.trips, body, (cotangent, taps, gradients, ready))

    def backward_weight(
        self,
        x: Array,
        inputs: Tree,
        residuals: Rings,
        taps: Rings,
        tap_slot: Array,
        work: Work,
        gradients: Tree,
        is_busy: Array | bool = True,
    ) -> Tree:
        """Add the gradients of matrices that `backward_input` has left; none where not `is_busy`.

        Of `x` only the shape is looked at.
        """
        closure = self._closure(x, inputs)
        like = self._tap_shapes(x, inputs)

        def body(index: Array, gradients: Tree) -> Tree:
            parameters = self._at(work.first + index)
            known = self._known(closure, parameters, inputs, residuals, work, index)
            given = self._cotangents(x, 1.0)
            split = self._split(closure, known, given)
            tapped = [
                from_bits(read(ring, tap_slot, index), leaf.dtype)
                for ring, leaf in zip(taps, like, strict=True)
            ]
            # In an empty slot they are another microbatch's; the gradients are linear in them.
            tapped = [jnp.where(is_busy, tap, jnp.zeros_like(tap)) for tap in tapped]
            late = split.late(known, self._masked(tapped, work, index))
            places = [place for place, is_late in enumerate(split.is_late) if is_late]
            found = dict(zip(places, late, strict=True))
            return self._add(gradients, found, work.first + index)

        return lax.fori_loop(0, work.trips, body, gradients)

    def empty_residuals(self, x: Array, inputs: Tree, num_slots: int) -> Rings:
        """Rings for the activations of `num_slots` microbatches shaped like `x`."""
        return self._sent(self._empty(self._closure(x, inputs).saved, num_slots))

    def empty_taps(self, x: Array, inputs: Tree, num_slots: int) -> Rings:
        """Rings for what weight gradients wait for."""
        return self._empty(self._tap_shapes(x, inputs), num_slots)

    def _empty(self, leaves: Sequence[jax.ShapeDtypeStruct], num_slots: int) -> Rings:
        return [
            vary(jnp.zeros((num_slots, self.num_rows, *leaf.shape), bits_dtype(leaf.dtype)))
            for leaf in leaves
        ]

    def _sent(self, leaves: Sequence[Array]) -> list[Array]:
        """Residuals on their way into the rings."""
        return (
            [jax.device_put(a, jax.memory.Space.Host) for a in leaves]
            if self.offload
            else list(leaves)
        )

    def _fetched(self, leaf: Array) -> Array:
        return jax.device_put(leaf, jax.memory.Space.Device) if self.offload else leaf

    def made_ready(self, row: Array | int) -> Tree:
        """The layer of `row`, whole, as it travels."""
        return self.gather(jax.tree.map(lambda a: read(a, row), self.parameters))

    def _at(self, row: Array | int) -> Tree:
        return self._restored(self.made_ready(row))

    def _whole(self, row: Array, ready: Tree, upcoming: Array) -> tuple[Tree, Tree]:
        """The layer of `row`, and where layers are gathered ahead that of row `upcoming`."""
        if ready is None:
            return self._at(row), None
        return self._restored(ready), self.made_ready(upcoming)

    def _restored(self, wire: Tree) -> Tree:
        """In the masters' dtype, which cancels against the cast inside `ops.dot`."""
        return jax.tree.map(lambda w, a: w.astype(a.dtype), wire, self.parameters)

    @staticmethod
    def _before(work: Work, index: Array) -> Array:
        """The row whose turn it is after row `index` of the stretch, going back."""
        return jnp.where(index > 0, work.first + index - 1, work.then)

    def _inputs(self, inputs: Tree, row: Array | int) -> Tree:
        return self.select(inputs, read(self.numbers, row))

    def _cotangents(self, cotangent: Array, loss_cotangent: Array | float) -> list[Array]:
        return [cotangent, *([vary(jnp.float32(loss_cotangent))] if self.has_loss else [])]

    @staticmethod
    def _masked(arrays: Sequence[Array], work: Work, index: Array) -> list[Array]:
        """Zeros where row `index` of the stretch has no layer."""
        if work.live is None:
            return list(arrays)
        return [jnp.where(index < work.live, a, jnp.zeros_like(a)) for a in arrays]

    @staticmethod
    def _passed(dx: Array, cotangent: Array, work: Work, index: Array) -> Array:
        return dx if work.live is None else jnp.where(index < work.live, dx, cotangent)

    def _add(self, gradients: Tree, found: dict[int, Array], row: Array) -> Tree:
        """`gradients` with those of some leaves, by their place, added to row `row`."""
        leaves, tree = jax.tree.flatten(gradients)
        for place, g in self.scatter(found).items():
            total = leaves[place]
            leaves[place] = write(total, read(total, row) + g.astype(total.dtype), row)
        return jax.tree.unflatten(tree, leaves)

    def _known(
        self,
        closure: _Closure,
        parameters: Tree,
        inputs: Tree,
        residuals: Rings,
        work: Work,
        index: Array,
    ) -> list[Array]:
        """The leaves of a layer's vjp closure, some out of the rings."""
        row = work.first + index
        known = jax.tree.leaves((parameters, self._inputs(inputs, row)))
        saved = (
            from_bits(self._fetched(read(ring, work.slot, index)), leaf.dtype)
            for ring, leaf in zip(residuals, closure.saved, strict=True)
        )
        return [next(saved) if k is None else known[k] for k in closure.known]

    def _split(
        self, closure: _Closure, known: Sequence[Array], cotangents: Sequence[Array]
    ) -> Split:
        def backward(
            known: Sequence[Array], cotangents: Sequence[Array]
        ) -> tuple[list[Array], Array]:
            return _pull(closure, known, cotangents, self.has_loss)

        is_late = [leaf.ndim > 2 for leaf in jax.tree.leaves(self.parameters)]
        return split_backward(backward, known, cotangents, is_late)

    def _tap_shapes(self, x: Array, inputs: Tree) -> list[jax.ShapeDtypeStruct]:
        def first() -> list[Array]:
            _, saved, closure = self._linearize_first(x, inputs)
            leaves = jax.tree.leaves((self._at(0), self._inputs(inputs, 0)))
            rest = iter(saved)
            known = [next(rest) if k is None else leaves[k] for k in closure.known]
            cotangents = self._cotangents(x, 1.0)
            return self._split(closure, known, cotangents).early(known, cotangents)[2]

        return jax.eval_shape(first)

    def _linearize_first(
        self, x: Array, inputs: Tree
    ) -> tuple[tuple[Array, Array | None], list[Array], _Closure]:
        return self._linearize(self._at(0), x, self._inputs(inputs, 0))

    def _linearize(
        self, parameters: Tree, x: Array, inputs: Tree
    ) -> tuple[tuple[Array, Array | None], list[Array], _Closure]:
        y, vjp = jax.vjp(lambda p, x: self.layer(p, x, inputs), parameters, x)
        leaves, tree = jax.tree.flatten(vjp)
        inputs_by_id = {id(a): i for i, a in enumerate(jax.tree.leaves((parameters, inputs)))}
        known = [inputs_by_id.get(id(leaf)) for leaf in leaves]
        saved = [leaf for leaf, k in zip(leaves, known, strict=True) if k is None]
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in saved]
        return y, saved, _Closure(tree, known, shapes)

    def _closure(self, x: Array, inputs: Tree) -> _Closure:
        leaves, tree = jax.tree.flatten((x, inputs))
        kind = tree, *map(jax.typeof, leaves)
        if kind not in self._closures:
            jax.eval_shape(
                lambda: self._closures.update({kind: self._linearize_first(x, inputs)[2]})
            )
        return self._closures[kind]


def _put(rings: Rings, leaves: Sequence[Array], slot: Array | int, index: Array) -> Rings:
    return [
        write(ring, as_bits(leaf), slot, index) for ring, leaf in zip(rings, leaves, strict=True)
    ]


def _pull(
    closure: _Closure, known: Sequence[Array], cotangents: Sequence[Array], has_loss: bool
) -> tuple[list[Array], Array]:
    """Gradients of one layer's parameters, leaf by leaf, and the cotangent of its x."""
    vjp = jax.tree.unflatten(closure.tree, known)
    given = cotangents[0], cotangents[1] if has_loss else None
    gradients, dx = vjp(tuple(given))
    return jax.tree.leaves(gradients), dx
