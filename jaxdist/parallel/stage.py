"""The layers of one pipeline stage, forward and backward, with the residuals kept by hand.

Autodiff sees one layer at a time: `jax.vjp` of a layer gives its output and the leaves of its
vjp closure. Leaves that are inputs again (the layer's parameters, RoPE tables, segment ids) are
told by identity and dropped; the rest go into a ring, from which the backward rebuilds the
closure. What a leaf is, is the remat policy's choice: everything, the layer's input alone, or
some names between. Loops, collectives and gradient accumulation thus stay outside of autodiff.

Shapes: L layers of this stage, R ring slots.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from jaxdist.parallel.collectives import vary
from jaxdist.parallel.stacks import as_bits, from_bits, read, write

Tree = Any
# (one layer's parameters, x, its inputs) -> x, its own loss [] or None
Layer = Callable[[Tree, Array, Tree], tuple[Array, Array | None]]
Residuals = list[Array]  # each [R, L, ...]


@dataclass(frozen=True)
class _Closure:
    """Static half of a layer's vjp closure.

    Its tree, which leaves are inputs (by position), and the dtypes of the others.
    """

    tree: Any
    known: list[int | None]
    dtypes: list[Any]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Runs a stage's layers; `parameters` is the stack [L, ...], whole or sharded over dp.

    `gather` makes one layer's parameters whole (ZeRO-3), `scatter` takes one layer's gradients to
    the shape of the accumulator (ZeRO-2 and 3: summed over dp and cut to the shard).

    `select` takes a microbatch's inputs and a layer's number in the model to that layer's inputs.
    It runs outside of autodiff, so what it makes is made again in the backward, not kept.
    `numbers` goes with the stack: entry i is the number of the layer in parameters[i].
    """

    layer: Layer
    has_loss: bool  # whether layers have a loss of their own, added to the model's
    parameters: Tree
    numbers: Array  # [L] int32
    select: Callable[[Tree, Array], Tree]
    num_layers: int
    gather: Callable[[Tree], Tree]
    scatter: Callable[[Tree], Tree]

    def forward(
        self, x: Array, inputs: Tree, residuals: Residuals, slot: Array, trips: Array | int
    ) -> tuple[Array, Array | None, Residuals]:
        """Apply the layers, saving into ring slot `slot`; `trips` is `num_layers`, or 0 to idle.

        Returns x, the sum of the layers' own losses (None where they have none), and the rings.
        """

        def body(index: Array, carry: tuple[Array, Array | None, Residuals]):
            x, loss, residuals = carry
            (x, own), saved, _ = self._linearize(self._at(index), x, self._inputs(inputs, index))
            residuals = [
                write(ring, as_bits(leaf), slot, index)
                for ring, leaf in zip(residuals, saved, strict=True)
            ]
            return x, jax.tree.map(jnp.add, loss, own), residuals

        loss = vary(jnp.float32(0)) if self.has_loss else None
        return lax.fori_loop(0, trips, body, (x, loss, residuals))

    def forward_only(self, x: Array, inputs: Tree, trips: Array | int) -> Array:
        """Apply the layers and save nothing."""

        def body(index: Array, x: Array) -> Array:
            return self.layer(self._at(index), x, self._inputs(inputs, index))[0]

        return lax.fori_loop(0, trips, body, x)

    def backward(
        self,
        cotangent: Array,
        inputs: Tree,
        residuals: Residuals,
        slot: Array,
        trips: Array | int,
        gradients: Tree,
        loss_cotangent: Array | float = 1.0,
    ) -> tuple[Array, Tree]:
        """Take `cotangent` back through the layers of ring slot `slot`, adding to `gradients`.

        `loss_cotangent` is that of each layer's own loss.
        """
        closure = self._closure(cotangent, inputs)
        loss_cotangent = vary(jnp.float32(loss_cotangent)) if self.has_loss else None

        def body(step: Array, carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
            cotangent, gradients = carry
            index = trips - 1 - step
            parameters, own_inputs = self._at(index), self._inputs(inputs, index)
            known, saved = (
                jax.tree.leaves((parameters, own_inputs)),
                (
                    from_bits(read(ring, slot, index), dtype)
                    for ring, dtype in zip(residuals, closure.dtypes, strict=True)
                ),
            )
            leaves = [next(saved) if k is None else known[k] for k in closure.known]
            vjp = jax.tree.unflatten(closure.tree, leaves)
            layer_gradients, cotangent = vjp((cotangent, loss_cotangent))
            gradients = jax.tree.map(
                lambda total, g: write(total, read(total, index) + g.astype(total.dtype), index),
                gradients,
                self.scatter(layer_gradients),
            )
            return cotangent, gradients

        return lax.fori_loop(0, trips, body, (cotangent, gradients))

    def empty_residuals(self, x: Array, inputs: Tree, num_slots: int) -> Residuals:
        """Rings for the activations of `num_slots` microbatches shaped like `x`."""
        saved = jax.eval_shape(
            lambda: [as_bits(leaf) for leaf in self._linearize_first(x, inputs)[1]]
        )
        return [
            vary(jnp.zeros((num_slots, self.num_layers, *leaf.shape), leaf.dtype)) for leaf in saved
        ]

    def _at(self, index: Array | int) -> Tree:
        return self.gather(jax.tree.map(lambda a: read(a, index), self.parameters))

    def _inputs(self, inputs: Tree, index: Array | int) -> Tree:
        return self.select(inputs, read(self.numbers, index))

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
        return y, saved, _Closure(tree, known, [leaf.dtype for leaf in saved])

    def _closure(self, x: Array, inputs: Tree) -> _Closure:
        found: list[_Closure] = []
        jax.eval_shape(lambda: found.append(self._linearize_first(x, inputs)[2]))
        return found[0]
