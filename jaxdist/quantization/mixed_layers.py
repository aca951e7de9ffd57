"""A stack whose layers are stored unlike, as in files called Q4_K_M, for a loop over its layers.

Layers that are stored alike are a stack of their own; a layer's number tells which, and where in
it. A program so holds one product for each kind, not one for each layer, and computes one of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdist.ops.stacks import read
from jaxdist.quantization.gguf_blocks import PackedWeight, dot_of_either


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixedLayers:
    """Stacks of `PackedWeight`s or arrays [.., K, N], and for each layer the place of its own."""

    stacks: tuple[Any, ...]
    kinds: Any  # [L] int32: which stack
    places: Any  # [L] int32: where in it


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixedLayer:
    """One layer's weight, left in its stack."""

    stacks: tuple[Any, ...]
    kind: jax.Array
    place: jax.Array

    def __getitem__(self, index: EllipsisType) -> "MixedLayer":
        """Itself: a Module asks for its parameter's whole value so."""
        return self


def mixed(layers: Sequence[Any]) -> MixedLayers:
    """Of one weight a layer, each a `PackedWeight` or an array."""
    names = [layer.type_name if isinstance(layer, PackedWeight) else "" for layer in layers]
    kinds = sorted(set(names))
    alike = [[n for n, name in enumerate(names) if name == kind] for kind in kinds]
    places = np.zeros(len(layers), np.int32)
    for numbers in alike:
        places[numbers] = np.arange(len(numbers))
    return MixedLayers(
        stacks=tuple(
            jax.tree.map(lambda *parts: jnp.stack(parts), *(layers[n] for n in numbers))
            for numbers in alike
        ),
        kinds=jnp.array([kinds.index(name) for name in names], jnp.int32),
        places=jnp.array(places),
    )


def mixed_layer(weight: MixedLayers, number: jax.Array | int) -> MixedLayer:
    """Layer `number`."""
    return MixedLayer(stacks=weight.stacks, kind=weight.kinds[number], place=weight.places[number])


def kept_dot(x: jax.Array, weight: Any, compute_dtype: DTypeLike) -> jax.Array:
    """`dot_of_either`, or that with the one weight that a `MixedLayer` is."""
    if not isinstance(weight, MixedLayer):
        return dot_of_either(x, weight, compute_dtype)

    def branch(stack: PackedWeight | jax.Array) -> Callable[..., jax.Array]:
        def product(x: jax.Array, place: jax.Array) -> jax.Array:
            own = jax.tree.map(lambda part: read(part, place), stack)
            return dot_of_either(x, own, compute_dtype)

        return product

    return jax.lax.switch(weight.kind, [branch(stack) for stack in weight.stacks], x, weight.place)
