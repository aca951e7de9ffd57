"""Weights on the mesh of a server: straight into shards, one array a layer.

Layers are unrolled in serving, since a scan over a stack of bf16 weights widens the whole stack at
each step on the CPU. Each array of a layer keeps a leading dim of the stages, so that one program
serves them all. The tables of embedding and head are over tp alone: every stage has them.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig
from jaxdist.models.layers import Linear
from jaxdist.models.transformer import Block, Transformer
from jaxdist.ops.linear import fits_blocks, in_blocks
from jaxdist.parallel.sharding import Rules, layouts, parameter_specs, shardings

Load = Callable[[Any], Any]  # parameters in the structure, dtypes and shardings of its argument


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's arrays and their specs; both trees are `(model without layers, [Block, ...])`.

    The leaves of entry l of the list are [S, ...]: layer l of each of the S stages.
    """

    config: ModelConfig
    rules: Rules
    arrays: Any
    specs: Any


def place(config: ModelConfig, load: Load, mesh: Mesh, dtype: str) -> Weights:
    """Read the weights into shards on `mesh`."""
    shape = MeshShape(**mesh.shape)
    # The rows of the tables are divided over tp; `load` fills what is beyond the vocabulary.
    config = replace(config, vocab_multiple=math.lcm(config.vocab_multiple, shape.tp))
    rules = Rules.of(config, ParallelConfig(zero=0), shape)
    rules = replace(rules, table=rules.table | {"vocab": "tp"})
    like = jax.eval_shape(
        lambda key: Transformer(config, key=key, param_dtype=jnp.dtype(dtype)), jax.random.key(0)
    )
    specs = parameter_specs(layouts(like, rules), zero=0)
    like = jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        like,
        shardings(mesh, specs),
    )
    model = load(like)
    rest = without_layers(model)
    stacks = [jax.tree.flatten(s) for s in (model.dense_layers, model.layers) if s is not None]
    del model  # each stack is freed as soon as it is cut
    layers = []
    for leaves, structure in stacks:
        count = leaves[0].shape[0] // shape.pp
        layers += [jax.tree.unflatten(structure, layer) for layer in _cut(leaves, shape.pp, count)]
    if shape.tp == 1:
        layers = [_laid_out(layer, NamedSharding(mesh, P("pp"))) for layer in layers]
        rest = _with_head(rest, NamedSharding(mesh, P()))
    staged = jax.tree.map(lambda leaf: P("pp", *leaf.sharding.spec[1:]), layers)
    return Weights(
        config=config,
        rules=rules,
        arrays=(rest, layers),
        specs=(jax.tree.map(lambda leaf: leaf.sharding.spec, rest), staged),
    )


def without_layers(model: Transformer) -> Transformer:
    """The model's other half: embedding, final norm, head."""
    other = copy.copy(model)
    other.layers = other.dense_layers = None
    return other


def _laid_out(layer: Block, sharding: NamedSharding) -> Block:
    """The layer with the weights of its linear layers as the backend wants them."""

    def lay_out(node: Any) -> Any:
        if type(node) is not Linear:
            return node
        weight = node.weight[...]
        if weight.ndim != 3 or not fits_blocks(weight.shape[-1], weight.dtype, _platform(sharding)):
            return node
        node = copy.copy(node)
        node.weight = node.weight.replace(jax.jit(in_blocks, out_shardings=sharding)(weight))
        return node

    return jax.tree.map(lay_out, layer, is_leaf=lambda node: isinstance(node, Linear))


def _with_head(rest: Transformer, sharding: NamedSharding) -> Transformer:
    """With a head of its own where the backend wants it laid out in another way than the table."""
    table = rest.embed_tokens if rest.lm_head is None else rest.lm_head
    rows, _ = table[...].shape
    if not fits_blocks(rows, table[...].dtype, _platform(sharding)):
        return rest
    head = jax.jit(lambda table: in_blocks(table.T), out_shardings=sharding)(table[...])
    rest = copy.copy(rest)
    rest.lm_head = nnx.data(table.replace(head))  # in a tied model it was nothing
    return rest


def _platform(sharding: NamedSharding) -> str:
    return sharding.mesh.devices.flat[0].platform


def _cut(leaves: list[jax.Array], num_stages: int, num_layers: int) -> list[list[jax.Array]]:
    """Stacks [S * L, ...], which are used up, as L lists of leaves [S, ...]."""
    layers: list[list[jax.Array]] = [[] for _ in range(num_layers)]
    while leaves:
        stack = leaves.pop(0)

        def cut(stack: jax.Array) -> list[jax.Array]:
            stack = stack.reshape(num_stages, num_layers, *stack.shape[1:])
            return [stack[:, layer] for layer in range(num_layers)]

        shardings = [stack.sharding] * num_layers
        for layer, leaf in zip(layers, jax.jit(cut, out_shardings=shardings)(stack), strict=True):
            layer.append(leaf)
    return layers
