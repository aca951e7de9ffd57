"""A run's state in the model's own order of layers: what checkpoints hold.

Parameters, moments and EMA of a run with uneven stages or several chunks lie in another order
(`parallel/layer_order.py`). They are put back before a checkpoint is written, and out again after
one is read, so that any mesh and schedule resumes it, and whoever reads it finds a plain model.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P

from jaxdist.parallel.layer_order import LayerOrder, from_rest, to_rest
from jaxdist.training.tree_names import named_leaves, tree_of

Tree = Any

STACK = "layers"  # part of the name of each leaf that counts the layers in dim 0


def in_models_order(tree: Tree, order: LayerOrder) -> Tree:
    """Arrays of a state, or of its parameters, with their stacks [layers, ...].

    One leaf is put in order at a time, so that no more than that is held twice beyond the result.
    """
    if order.is_plain:
        return tree
    named = named_leaves(tree)
    return tree_of({name: _from_rest(name, leaf, order) for name, leaf in named.items()}, tree)


def at_rest(tree: Tree, like: Tree, order: LayerOrder) -> Tree:
    """The way back, into the shardings of `like`."""
    if order.is_plain:
        return tree
    targets = named_leaves(like)

    def one(name: str, leaf: Array) -> Array:
        if not _is_stack(name, leaf):
            return leaf
        return _changed(leaf, to_rest, order, targets[name].sharding)

    return tree_of({name: one(name, leaf) for name, leaf in named_leaves(tree).items()}, tree)


def target(like: Tree, order: LayerOrder) -> Tree:
    """What `in_models_order` gives, abstract: `like` holds the shapes and shardings at rest."""
    if order.is_plain:
        return like

    def one(name: str, leaf: Any) -> Any:
        if not _is_stack(name, leaf):
            return leaf
        shape = (len(order.places), *leaf.shape[1:])
        sharding = _sharding(leaf.sharding, shape, order)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return tree_of({name: one(name, leaf) for name, leaf in named_leaves(like).items()}, like)


def _is_stack(name: str, leaf: Any) -> bool:
    return STACK in name.split("/") and leaf.ndim > 0


def _from_rest(name: str, leaf: Array, order: LayerOrder) -> Array:
    if not _is_stack(name, leaf):
        return leaf
    sharding = _sharding(leaf.sharding, (len(order.places), *leaf.shape[1:]), order)
    return _changed(leaf, from_rest, order, sharding)


def _sharding(sharding: Sharding, shape: tuple[int, ...], order: LayerOrder) -> Sharding:
    """Of a stack in the model's order: pp on another dim where it does not divide the layers."""
    assert isinstance(sharding, NamedSharding)
    spec = [*sharding.spec, *(None,) * (len(shape) - len(sharding.spec))]
    if spec[0] is None or shape[0] % order.num_stages == 0:
        return sharding
    spec[0] = None
    for dim in sorted(range(1, len(shape)), key=lambda dim: -shape[dim]):
        axes = _axes(spec[dim])
        parts = order.num_stages
        for axis in axes:
            parts *= sharding.mesh.shape[axis]
        if shape[dim] % parts == 0:
            spec[dim] = (*axes, "pp")
            break
    return NamedSharding(sharding.mesh, P(*spec))


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _changed(
    leaf: Array, change: Callable[..., Array], order: LayerOrder, sharding: Sharding
) -> Array:
    """The leaf in another order, once it is there.

    Simulated devices share threads: a program that is begun beside the one before it can hold the
    thread that one of that program's devices needs, and both would wait for ever.
    """
    leaf = jax.block_until_ready(leaf)
    return jax.block_until_ready(_program(change, order, sharding)(leaf))


@lru_cache(maxsize=256)
def _program(
    change: Callable[..., Array], order: LayerOrder, sharding: Sharding
) -> Callable[[Array], Array]:
    """One program for all leaves that lie alike."""
    return jax.jit(partial(change, order=order), out_shardings=sharding)
