"""Weights on the mesh of a server: straight into shards, laid out as the backend wants them.

Layers stay stacks, over which a step loops: a program is then compiled as quickly for many layers
as for one. But a GPU would copy each weight out of its stack before it multiplies, three times the
traffic of decoding, so there each layer is a stack of its own. Each stack has a leading dim of the
stages, so that one program serves them all. The tables of embedding and head are over tp alone:
every stage has them. Weights that stay in the blocks of their file are stacks of its integers.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.config import MeshShape, ModelConfig, ParallelConfig
from jaxdist.inference.weights.huge_pages import into_huge_pages
from jaxdist.inference.weights.products import block_spec
from jaxdist.models.layers import Linear, PerLayer
from jaxdist.models.transformer import Block, Transformer
from jaxdist.ops.linear import Blocks, Split, fits_blocks, in_blocks
from jaxdist.ops.stacks import as_bits, from_bits, read
from jaxdist.parallel.sharding import Rules, layouts, parameter_specs, shardings
from jaxdist.quantization import packed_layers
from jaxdist.quantization.gguf_blocks import PackedWeight
from jaxdist.quantization.packed_layers import MixedLayers

Load = Callable[[Any], Any]  # parameters in the structure, dtypes and shardings of its argument


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A model's arrays and their specs; both trees are `(model without layers, [Block, ...])`.

    An entry of the list is a stack of layers that are alike, its leaves [S, L, ...]: L layers of
    each of the S stages. On the CPU 16-bit leaves are bits, which `layer_of` takes for floats.
    """

    config: ModelConfig
    rules: Rules
    arrays: Any
    specs: Any

    @property
    def keeps_blocks(self) -> bool:
        """Whether weights stay in the blocks of their file."""
        nodes = jax.tree.leaves(self.arrays[1], is_leaf=_is_kept)
        return any(map(_is_kept, nodes))


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
    kinds = [
        jax.tree.flatten(s, is_leaf=_is_kept)
        for s in (model.dense_layers, model.layers)
        if s is not None
    ]
    del model  # a leaf is freed as soon as it is laid out
    stacks = [stack for kind in kinds for stack in _laid_out(*kind, mesh, rules)]
    if shape.tp == 1 or platform_of(mesh) == "cpu":
        rest = _with_head(rest, mesh)
    if platform_of(mesh) == "cpu":
        into_huge_pages((rest, stacks))
    staged = jax.tree.map(lambda leaf: leaf.sharding.spec, stacks)
    return Weights(
        config=config,
        rules=rules,
        arrays=(rest, stacks),
        specs=(jax.tree.map(lambda leaf: leaf.sharding.spec, rest), staged),
    )


def without_layers(model: Transformer) -> Transformer:
    """The model's other half: embedding, final norm, head."""
    other = copy.copy(model)
    other.layers = other.dense_layers = None  # pyright: ignore[reportAttributeAccessIssue]
    return other


def layer_of(stack: Block, number: Array | int, dtype: DTypeLike, rules: Rules) -> Block:
    """Layer `number` of one stage's stack, leaves [L, ...], as its Module; weights in blocks stay
    where they lie. dtype: of the floats that are kept as bits."""

    def one(leaf: Any, split: Split | None) -> Any:
        if isinstance(leaf, (PackedWeight, MixedLayers)):
            return packed_layers.layer_of(leaf, number)
        if split is not None and leaf.ndim == 4:
            return Blocks(leaf, number, split)
        leaf = read(leaf, number)
        return from_bits(leaf, dtype) if leaf.dtype == jnp.uint16 else leaf

    return jax.tree.map(one, stack, _splits(stack, rules), is_leaf=_is_kept)


def num_layers(stack: Block) -> int:
    """Of one stage's stack."""
    return stack.post_attention_layernorm.weight.shape[0]


def _splits(stack: Block, rules: Rules) -> Any:
    """For each leaf how tp splits it, None where it is not of a linear layer."""

    def splits(node: Any) -> Any:
        split = _split(node, rules) if isinstance(node, Linear) else None
        return jax.tree.map(lambda _: split, node, is_leaf=_is_kept)

    return jax.tree.map(splits, stack, is_leaf=lambda n: isinstance(n, Linear) or _is_kept(n))


def _split(linear: Linear, rules: Rules) -> Split:
    rows, columns = (rules.table.get(axis) for axis in linear.weight.get_metadata("axes")[-2:])
    return "columns" if columns == "tp" else "rows" if rows == "tp" else "whole"


def _is_kept(node: Any) -> bool:
    """Whether it is a weight, or a stack of them, that stays in the blocks of its file."""
    return isinstance(node, (PackedWeight, PerLayer, MixedLayers))


def _laid_out(leaves: list[Any], structure: Any, mesh: Mesh, rules: Rules) -> list[Block]:
    """Leaves of a stack [S * L, ...], which are used up, as the stacks that the backend wants."""
    platform = platform_of(mesh)
    splits = structure.flatten_up_to(_splits(jax.tree.unflatten(structure, leaves), rules))

    def in_stages(leaf: Array) -> Array:
        return leaf.reshape(mesh.shape["pp"], -1, *leaf.shape[1:])

    def lay_out(leaf: Array) -> list[Array]:
        leaf = in_stages(leaf)
        if platform == "gpu":
            return [leaf[:, layer : layer + 1] for layer in range(leaf.shape[1])]
        return [as_bits(leaf) if platform == "cpu" else leaf]

    parts = []
    for split in splits:
        leaf = leaves.pop(0)
        if _is_kept(leaf):
            parts.append(_kept(leaf, split is not None, mesh))
            continue
        if split is not None and leaf.ndim == 3:
            _, rows, columns = leaf.sharding.shard_shape(leaf.shape)
            if fits_blocks(rows, columns, leaf.dtype, platform):
                parts.append([_in_blocks(leaf, in_stages, split, mesh, "pp")])
                continue
        _, *spec = leaf.sharding.spec
        sharding = NamedSharding(mesh, P("pp", None, *spec))
        parts.append(jax.jit(lay_out, out_shardings=sharding)(leaf))
    return [jax.tree.unflatten(structure, own) for own in zip(*parts, strict=True)]


def _in_blocks(
    w: Array, as_stack: Callable[[Array], Array], split: Split, mesh: Mesh, *lead: str
) -> Array:
    """A weight that `as_stack` makes [*lead, L, K, N], in blocks."""
    sharding = NamedSharding(mesh, P(*lead, None, *block_spec(split)))
    return jax.jit(lambda w: in_blocks(as_stack(w)), out_shardings=sharding)(w)


def _kept(weight: PackedWeight | PerLayer, is_linear: bool, mesh: Mesh) -> list[Any]:
    """A weight in blocks [S * L, ...] as the stacks that the backend wants."""
    by_layer = platform_of(mesh) == "gpu"
    lanes = platform_of(mesh) == "cpu" and is_linear and mesh.shape["tp"] == 1
    if isinstance(weight, PerLayer):  # of one stage, see `gguf.packed.check_packed`
        stacks = weight.layers if by_layer else (packed_layers.mixed(weight.layers, lanes),)
        lead = range(2 if by_layer else 1)
        return [_placed(jax.tree.map(lambda a: jnp.expand_dims(a, lead), s), mesh) for s in stacks]
    in_stages = mesh.shape["pp"]
    if lanes:
        weight = packed_layers.in_lanes(weight)
    stack = jax.tree.map(lambda a: a.reshape(in_stages, -1, *a.shape[1:]), weight)
    if not by_layer:
        return [_placed(stack, mesh)]
    count = jax.tree.leaves(stack)[0].shape[1]
    layers = [jax.tree.map(lambda a, n=n: a[:, n : n + 1], stack) for n in range(count)]
    return [_placed(layer, mesh) for layer in layers]


def _placed(tree: Any, mesh: Mesh) -> Any:
    """Arrays where they are, said by a spec on `mesh`."""

    def put(array: Array) -> Array:
        own = array.sharding
        spec = own.spec if isinstance(own, NamedSharding) else P()
        return jax.device_put(array, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def _with_head(rest: Transformer, mesh: Mesh) -> Transformer:
    """With a head of its own where the backend wants it laid out in another way than the table."""
    table = rest.embed_tokens if rest.lm_head is None else rest.lm_head
    vocab_size, depth = table[...].shape
    columns = vocab_size // mesh.shape["tp"]
    if not fits_blocks(depth, columns, table[...].dtype, platform_of(mesh)):
        return rest
    head = _in_blocks(table[...], lambda table: table.T[None], "columns", mesh)
    rest = copy.copy(rest)
    # In a tied model it was nothing.
    rest.lm_head = nnx.data(table.replace(head))  # pyright: ignore[reportAttributeAccessIssue]
    return rest


def platform_of(mesh: Mesh) -> str:
    """Where the weights will be: "cpu", "gpu", "tpu"."""
    return mesh.devices.flat[0].platform
