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
Layer = Callable[[Tree, Array, Tree], Array]  # (one layer's parameters, x, inputs) -> x
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
    """

    layer: Layer
    parameters: Tree
    num_layers: int
    gather: Callable[[Tree], Tree]
    scatter: Callable[[Tree], Tree]

    def forward(
        self, x: Array, inputs: Tree, residuals: Residuals, slot: Array, trips: Array | int
    ) -> tuple[Array, Residuals]:
        """Apply the layers, saving into ring slot `slot`; `trips` is `num_layers`, or 0 to idle."""

        def body(index: Array, carry: tuple[Array, Residuals]) -> tuple[Array, Residuals]:
            x, residuals = carry
            x, saved, _ = self._linearize(self._at(index), x, inputs)
            return x, [
                write(ring, as_bits(leaf), slot, index)
                for ring, leaf in zip(residuals, saved, strict=True)
            ]

        return lax.fori_loop(0, trips, body, (x, residuals))

    def forward_only(self, x: Array, inputs: Tree, trips: Array | int) -> Array:
        """Apply the layers and save nothing."""
        return lax.fori_loop(0, trips, lambda i, x: self.layer(self._at(i), x, inputs), x)

    def backward(
        self,
        cotangent: Array,
        inputs: Tree,
        residuals: Residuals,
        slot: Array,
        trips: Array | int,
        gradients: Tree,
    ) -> tuple[Array, Tree]:
        """Take `cotangent` back through the layers of ring slot `slot`, adding to `gradients`."""
        closure = self._closure(cotangent, inputs)

        def body(step: Array, carry: tuple[Array, Tree]) -> tuple[Array, Tree]:
            cotangent, gradients = carry
            index = trips - 1 - step
            parameters = self._at(index)
            known, saved = (
                jax.tree.leaves((parameters, inputs)),
                (
                    from_bits(read(ring, slot, index), dtype)
                    for ring, dtype in zip(residuals, closure.dtypes, strict=True)
                ),
            )
            leaves = [next(saved) if k is None else known[k] for k in closure.known]
            layer_gradients, cotangent = jax.tree.unflatten(closure.tree, leaves)(cotangent)
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
            lambda: [as_bits(leaf) for leaf in self._linearize(self._at(0), x, inputs)[1]]
        )
        return [
            vary(jnp.zeros((num_slots, self.num_layers, *leaf.shape), leaf.dtype)) for leaf in saved
        ]

    def _at(self, index: Array | int) -> Tree:
        return self.gather(jax.tree.map(lambda a: read(a, index), self.parameters))

    def _linearize(
        self, parameters: Tree, x: Array, inputs: Tree
    ) -> tuple[Array, list[Array], _Closure]:
        y, vjp = jax.vjp(lambda p, x: self.layer(p, x, inputs), parameters, x)
        leaves, tree = jax.tree.flatten(vjp)
        inputs_by_id = {id(a): i for i, a in enumerate(jax.tree.leaves((parameters, inputs)))}
        known = [inputs_by_id.get(id(leaf)) for leaf in leaves]
        saved = [leaf for leaf, k in zip(leaves, known, strict=True) if k is None]
        return y, saved, _Closure(tree, known, [leaf.dtype for leaf in saved])

    def _closure(self, x: Array, inputs: Tree) -> _Closure:
        found: list[_Closure] = []
        jax.eval_shape(lambda: found.append(self._linearize(self._at(0), x, inputs)[2]))
        return found[0]
