"""Collectives over the manual axes dp and pp, on arrays whose tp sharding the partitioner manages.

Each runs in a small `shard_map` that makes tp manual too, so that it moves the local shard and
nothing else: as plain `lax` collectives in a region manual over dp and pp alone, they made the
partitioner gather over tp first. None of them is ever seen by autodiff.
"""

from collections.abc import Callable

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P


def vary(x: Array, axes: tuple[str, ...] = ("dp", "pp")) -> Array:
    """Mark `x` as different on each member of `axes` (no data moves).

    A replicated parameter differentiated inside `shard_map` makes each `jax.vjp` insert a psum;
    one marked as varying does not, and is summed once, where we say.
    """
    missing = tuple(a for a in axes if a not in jax.typeof(x).manual_axis_type.varying)
    return lax.pcast(x, missing, to="varying") if missing else x


def psum(x: Array, axis: str, spec: P) -> Array:
    """Sum over `axis`; `spec` is the tp sharding of `x`."""
    return _over_tp(lambda x: lax.psum(x, axis), spec)(x)


def reduce_scatter(x: Array, axis: str, dim: int, spec: P) -> Array:
    """Sum over `axis`, of which each member keeps its slice of `dim`."""
    return _over_tp(lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True), spec)(x)


def all_gather(x: Array, axis: str, dim: int, spec: P) -> Array:
    """Concatenate the members' slices along `dim`."""
    return _over_tp(lambda x: lax.all_gather(x, axis, axis=dim, tiled=True), spec)(x)


@jax.named_scope("ring")
def ring_shift(x: Array, axis: str, by: int, spec: P) -> Array:
    """Send `x` to the member `by` places further; always a full ring, never a partial one."""
    size = lax.axis_size(axis)
    if size == 1:
        return x
    ring = [(member, (member + by) % size) for member in range(size)]
    return _over_tp(lambda x: lax.ppermute(x, axis, ring), spec)(x)


def sum_into(spec: P, x: Array, axes: tuple[str, ...]) -> Array:
    """Where tp is manual already: the sum of `x` over `axes`, one of which is tp.

    Where `spec` shards a dim over tp, each member keeps its slice of that dim.
    """
    if "tp" not in spec:
        return lax.psum(x, axes)
    x = lax.psum_scatter(x, "tp", scatter_dimension=spec.index("tp"), tiled=True)
    others = tuple(axis for axis in axes if axis != "tp")
    return lax.psum(x, others) if others else x


def _over_tp(function: Callable[[Array], Array], spec: P) -> Callable[[Array], Array]:
    return jax.shard_map(function, axis_names={"tp"}, in_specs=spec, out_specs=spec)
