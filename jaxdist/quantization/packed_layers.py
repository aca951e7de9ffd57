"""Stacks of layers in blocks, of which a server's loop multiplies one after the other.

A layer is left where it lies, in the stack of those that are stored alike. In files called Q4_K_M
there are several such stacks: a layer's number tells which, and where in it, so that a program
holds one product for each kind and computes one of them.

CPUs take a stack in lanes, [L, N / LANES, B, part, LANES]: the columns of a few lanes are made into
numbers in the cache and multiplied there, so that memory is read packed. Other backends take it as
it is, [L, B, part, N].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxdist.ops.dot import dot
from jaxdist.ops.experts import grouped_dot, over_blocks
from jaxdist.ops.linear import LANES, in_parts, sum_of_parts
from jaxdist.ops.product import cpu_multiplies_bf16
from jaxdist.ops.stacks import as_bits, from_bits, read
from jaxdist.quantization.gguf_blocks import PackedWeight, unpack

IN_LANES = 5  # dims of a part, the stack's included
FEW = 64  # rows of x up to which lanes are multiplied in fp32 also where bf16 is quicker


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MixedLayers:
    """Stacks of `PackedWeight`s or arrays [.., K, N], and for each layer the place of its own."""

    stacks: tuple[Any, ...]
    kinds: jax.Array  # [L] int32: which stack
    places: jax.Array  # [L] int32: where in it


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """One layer's weight, left in its stack."""

    stacks: tuple[Any, ...]
    kind: Any  # a number, perhaps traced: which of them
    place: Any  # where in it

    @property
    def shape(self) -> tuple[int, ...]:
        """Of experts, which are in no lanes: [E, K, N]."""
        return self.stacks[0].shape[1:]

    def __getitem__(self, index: EllipsisType) -> "KeptLayer":
        """Itself: a Module asks for its parameter's whole value so."""
        return self


def mixed(layers: Sequence[Any], lanes: bool) -> MixedLayers:
    """Of one weight a layer, each a `PackedWeight` or an array."""
    names = [layer.type_name if isinstance(layer, PackedWeight) else "" for layer in layers]
    kinds = sorted(set(names))
    stacks, places = [], np.zeros(len(layers), np.int32)
    for kind in kinds:
        numbers = [number for number, name in enumerate(names) if name == kind]
        places[numbers] = np.arange(len(numbers))
        stack = jax.tree.map(lambda *parts: jnp.stack(parts), *(layers[n] for n in numbers))
        stacks.append(in_lanes(stack) if lanes and kind else jax.tree.map(as_bits, stack))
    numbers = [kinds.index(name) for name in names]
    return MixedLayers(
        stacks=tuple(stacks), kinds=jnp.array(numbers, jnp.int32), places=jnp.array(places)
    )


def in_lanes(stack: PackedWeight) -> PackedWeight:
    """Parts [L, B, part, N] as [L, N / LANES, B, part, LANES] where LANES divides N."""
    if stack.shape[-1] % LANES:
        return stack

    def split(part: jax.Array) -> jax.Array:
        lanes = part.reshape(*part.shape[:-1], -1, LANES)
        return jnp.moveaxis(lanes, -2, 1)

    return jax.tree.map(split, stack)


def layer_of(weight: PackedWeight | MixedLayers, number: jax.Array | int) -> KeptLayer:
    """Layer `number` of a stack."""
    if isinstance(weight, PackedWeight):
        return KeptLayer(stacks=(weight,), kind=0, place=number)
    return KeptLayer(stacks=weight.stacks, kind=weight.kinds[number], place=weight.places[number])


def kept_dot(x: jax.Array, weight: KeptLayer, compute_dtype: DTypeLike) -> jax.Array:
    """x [..., K] times the layer's weight -> [..., N], as `ops.dot` of the dequantized one."""

    def product(stack: Any, x: jax.Array, place: ArrayLike) -> jax.Array:
        if isinstance(stack, PackedWeight):
            return _packed_dot(x, stack, place, compute_dtype)
        return dot(x, _entry(stack, compute_dtype, place), compute_dtype)

    return _by_kind(weight, product, x)


def kept_grouped_dot(
    x_PK: jax.Array,
    weight: KeptLayer | jax.Array,
    *,
    groups: jax.Array,
    block: int,
    compute_dtype: DTypeLike,
) -> jax.Array:
    """`ops.experts.grouped_dot` with the layer's experts, each made into numbers when it is due."""
    if not isinstance(weight, KeptLayer):
        return grouped_dot(x_PK, weight, groups=groups, block=block, compute_dtype=compute_dtype)

    def product(stack: Any, x_PK: jax.Array, place: ArrayLike, groups_E: jax.Array) -> jax.Array:
        if block == 1:
            whole = _entry(stack, compute_dtype, place)
            return grouped_dot(x_PK, whole, groups=groups_E, block=1, compute_dtype=compute_dtype)

        def body(index: jax.Array, expert: jax.Array, out_PN: jax.Array) -> jax.Array:
            x_QK = lax.dynamic_slice_in_dim(x_PK, index * block, block)
            weight_KN = _entry(stack, compute_dtype, place, expert)
            out_QN: Any = dot(x_QK, weight_KN, compute_dtype)
            return lax.dynamic_update_slice_in_dim(out_PN, out_QN, index * block, 0)

        start = jnp.zeros((len(x_PK), stack.shape[-1]), compute_dtype)
        return over_blocks(len(x_PK), groups_E, block, body, start)

    return _by_kind(weight, product, x_PK, groups)


def _by_kind(
    weight: KeptLayer, product: Callable[..., jax.Array], x: jax.Array, *more: jax.Array
) -> jax.Array:
    """product(stack, x, place, ...) with the stack that the layer lies in."""
    branches = [partial(product, stack) for stack in weight.stacks]
    if len(branches) == 1:
        return branches[0](x, weight.place, *more)
    return lax.switch(weight.kind, branches, x, weight.place, *more)


def _entry(stack: Any, dtype: DTypeLike, *indices: ArrayLike) -> jax.Array:
    """One of a stack's weights as numbers; `dtype` is that of an array which is kept as bits."""
    if isinstance(stack, PackedWeight):
        return unpack(jax.tree.map(lambda part: read(part, *indices), stack))
    return from_bits(read(stack, *indices), dtype)


def _packed_dot(
    x: jax.Array, stack: PackedWeight, place: ArrayLike, compute_dtype: DTypeLike
) -> jax.Array:
    *lead, depth = x.shape
    rows = math.prod(lead)
    in_lanes = next(iter(stack.parts.values())).ndim == IN_LANES
    if in_lanes and (rows <= FEW or not cpu_multiplies_bf16()):
        out_RN = _by_lanes(x.reshape(rows, depth).astype(jnp.float32), stack, place)
        return out_RN.reshape(*lead, -1).astype(compute_dtype)
    weight = _entry(stack, compute_dtype, place)
    if in_lanes:  # [C, K, LANES]
        weight = jnp.moveaxis(weight, 0, 1).reshape(depth, -1)
    return dot(x, weight, compute_dtype)


def _by_lanes(x_RK: jax.Array, stack: PackedWeight, place: ArrayLike) -> jax.Array:
    """fp32 x times the columns of each block of lanes in turn, [R, N] fp32."""
    _, num_lanes, _, _, lanes = next(iter(stack.parts.values())).shape
    x_PRk = in_parts(x_RK)

    def columns(number: jax.Array, out_CRL: jax.Array) -> jax.Array:
        def own(part: jax.Array) -> jax.Array:
            start = (jnp.int32(place), number, 0 * number, 0 * number, 0 * number)
            return lax.dynamic_slice(part, start, (1, 1, *part.shape[2:]))[0, 0]

        # Or the numbers would be made again for each row, inside of the product.
        weight_KL = lax.optimization_barrier(unpack(jax.tree.map(own, stack)))
        return lax.dynamic_update_index_in_dim(out_CRL, sum_of_parts(x_PRk, weight_KL), number, 0)

    out_CRL = lax.fori_loop(0, num_lanes, columns, jnp.zeros((num_lanes, len(x_RK), lanes)))
    return jnp.moveaxis(out_CRL, 0, 1).reshape(len(x_RK), -1)
