"""How a backend keeps and reads pages of keys and values: decided here, once, at load.

Shapes: S stages, D replicas, P blocks, C tokens a block, K key/value heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops import kernels, paged_attention, paged_attention_gpu
from jaxdist.ops.paged_attention import Pages


@dataclass(frozen=True, kw_only=True)
class Paging:
    """A backend's way with pages.

    Attributes:
        key_dims: Order of the dims of a layer's keys, of "P C K H"; S and D lead.
        value_dims: Likewise of its values.
        holds_bits: 16-bit floats are kept as their bits.
        needs_region: Attention must run where every axis of the mesh is manual, even of one member:
            cuDNN's own partitioner knows nothing of such axes.
        write: As `ops.paged_attention.write_pages`.
        attend: As `ops.paged_attention.paged_attention`.
    """

    key_dims: str
    value_dims: str
    holds_bits: bool
    needs_region: bool
    write: Callable[..., Pages]
    attend: Callable[..., jax.Array]

    @property
    def specs(self) -> tuple[P, P]:
        """Of a layer's keys and of its values."""
        keys, values = (P("pp", "dp", *own) for own in self.own_specs)
        return keys, values

    @property
    def own_specs(self) -> tuple[P, P]:
        """Of one stage's and replica's part."""
        keys, values = (
            P(*("tp" if dim == "K" else None for dim in dims.split()))
            for dims in (self.key_dims, self.value_dims)
        )
        return keys, values

    def shapes(
        self, num_blocks: int, block_size: int, heads: int, widths: tuple[int, int]
    ) -> list[tuple[int, ...]]:
        """Of one stage's and replica's keys and values, whose head dims are `widths`."""
        found = []
        for dims, width in zip((self.key_dims, self.value_dims), widths, strict=True):
            sizes = {"P": num_blocks, "C": block_size, "K": heads, "H": width}
            found.append(tuple(sizes[dim] for dim in dims.split()))
        return found

    def num_heads(self, pages: Pages) -> int:
        """Heads of one member's part."""
        return pages.values.shape[self.value_dims.split().index("K")]

    def storage_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        """Of the arrays that hold keys and values of `dtype`."""
        dtype = jnp.dtype(dtype)
        return jnp.dtype(jnp.uint16) if self.holds_bits and dtype.itemsize == 2 else dtype


PLAIN = Paging(
    key_dims="P C K H",
    value_dims="P C K H",
    holds_bits=True,
    needs_region=False,
    write=paged_attention.write_pages,
    attend=paged_attention.paged_attention,
)
CPU = Paging(
    key_dims="P K H C",
    value_dims="P C K H",
    holds_bits=True,
    needs_region=False,
    write=partial(paged_attention.write_pages, key_page="k h c"),
    attend=partial(paged_attention.paged_attention, key_page="k h c"),
)
CPU_KERNELS = replace(CPU, write=kernels.write_pages, attend=kernels.attend)
GPU = Paging(
    key_dims="K P C H",
    value_dims="K P C H",
    holds_bits=False,
    needs_region=True,
    write=paged_attention_gpu.write_pages,
    attend=paged_attention_gpu.paged_attention,
)


def paging_of(mesh: Mesh) -> Paging:
    """That of the mesh's devices."""
    cpu = CPU_KERNELS if kernels.available() else CPU
    return {"gpu": GPU, "cpu": cpu}.get(mesh.devices.flat[0].platform, PLAIN)
