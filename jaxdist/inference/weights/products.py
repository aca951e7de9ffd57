"""Products with a weight in blocks that tp shares: by columns, or by rows, whose sums are added."""

import jax
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops.linear import Blocks, Split, linear

_SPECS: dict[Split, tuple[str | None, ...]] = {
    "whole": (),
    "columns": ("tp",),
    "rows": (None, "tp"),
}


def block_spec(split: Split) -> tuple[str | None, ...]:
    """Of a weight in blocks [N / lanes, K, lanes]."""
    return _SPECS[split]


def linear_over_tp(x: Array, w: Array | Blocks, compute_dtype: DTypeLike) -> Array:
    """`linear` [..., N] where dp and pp are manual and tp is the partitioner's.

    It cannot look into the loop over blocks, so that tp is manual here too.
    """
    if not isinstance(w, Blocks) or w.split == "whole":
        return linear(x, w, compute_dtype)
    split, lead = w.split, (None,) * (x.ndim - 1)

    def member(x: Array, stack: Array, layer: Array | int) -> Array:
        own = linear(x, Blocks(stack, layer), compute_dtype)
        return lax.psum(own, "tp") if split == "rows" else own

    return jax.shard_map(
        member,
        axis_names={"tp"},
        in_specs=(P(*lead, "tp" if split == "rows" else None), P(None, *block_spec(split)), P()),
        out_specs=P(*lead, "tp" if split == "columns" else None),
        check_vma=False,
    )(x, w.stack, w.layer)
