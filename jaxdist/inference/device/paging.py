"""How a backend keeps and reads pages of keys and values: decided here, once, at load.

Shapes: S stages, D replicas, P blocks, C tokens a block, K key/value heads, H head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxdist.ops import paged_attention, paged_attention_gpu
from jaxdist.ops.paged_attention import Pages


@dataclass(frozen=True, kw_only=True)
class Paging:
    """A backend's way with pages.

    Attributes:
        heads_first: A layer's pool is [S, D, K, P, C, H], otherwise [S, D, P, C, K, H].
        holds_bits: 16-bit floats are kept as their bits.
        needs_region: Attention must run where every axis of the mesh is manual, even of one member:
            cuDNN's own partitioner knows nothing of such axes.
        write: As `ops.paged_attention.write_pages`.
        attend: As `ops.paged_attention.paged_attention`.
    """

    heads_first: bool
    holds_bits: bool
    needs_region: bool
    write: Callable[..., Pages]
    attend: Callable[..., jax.Array]

    @property
    def spec(self) -> P:
        """Of a layer's keys, and of its values."""
        return P("pp", "dp", *self.own_spec)

    @property
    def own_spec(self) -> P:
        """Of one stage's and replica's part."""
        return P("tp", None, None, None) if self.heads_first else P(None, None, "tp", None)

    def shape(self, num_blocks: int, block_size: int, heads: int, width: int) -> tuple[int, ...]:
        """Of one stage's and replica's part."""
        blocks = (num_blocks, block_size)
        return (heads, *blocks, width) if self.heads_first else (*blocks, heads, width)

    def num_heads(self, pages: Pages) -> int:
        """Heads of one member's part."""
        return pages.keys.shape[0 if self.heads_first else 2]

    def storage_dtype(self, dtype: DTypeLike) -> jnp.dtype:
        """Of the arrays that hold keys and values of `dtype`."""
        dtype = jnp.dtype(dtype)
        return jnp.dtype(jnp.uint16) if self.holds_bits and dtype.itemsize == 2 else dtype


PLAIN = Paging(
    heads_first=False,
    holds_bits=True,
    needs_region=False,
    write=paged_attention.write_pages,
    attend=paged_attention.paged_attention,
)
GPU = Paging(
    heads_first=True,
    holds_bits=False,
    needs_region=True,
    write=paged_attention_gpu.write_pages,
    attend=paged_attention_gpu.paged_attention,
)


def paging_of(mesh: Mesh) -> Paging:
    """That of the mesh's devices."""
    return GPU if mesh.devices.flat[0].platform == "gpu" else PLAIN
