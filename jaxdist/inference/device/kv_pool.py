"""The pool of keys and values: how many blocks there are, and the arrays that hold them.

Their layout is the backend's, see `paging.py`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape, ModelConfig, UsageError
from jaxdist.inference.device.paging import Paging
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.scheduling.block_pool import blocks_for
from jaxdist.ops.paged_attention import Pages

# Tokens of a slot on a CPU where no fraction of its memory is asked for: the kernel clears the pool
# page by page at the start, a second and more for each GB.
USUAL = 2048


@dataclass(frozen=True, kw_only=True)
class PoolSize:
    """What was decided about the pool, in numbers for a report.

    Attributes:
        num_blocks: Blocks of one replica, the null block included.
        block_size: Tokens of a block.
        block_bytes: Bytes of one block on one device.
        free_bytes: Memory that was free on a device; None where num_blocks was given.
    """

    num_blocks: int
    block_size: int
    block_bytes: int
    free_bytes: int | None

    @property
    def tokens(self) -> int:
        """Tokens that fit into one replica's pool."""
        return (self.num_blocks - 1) * self.block_size

    def __str__(self) -> str:
        size = f"{self.num_blocks * self.block_bytes / 2**20:,.0f} MiB a device"
        free = "" if self.free_bytes is None else f" of {self.free_bytes / 2**20:,.0f} MiB free"
        return (
            f"KV pool: {self.num_blocks - 1:,} blocks of {self.block_size} tokens "
            f"({self.tokens:,} tokens a replica), {size}{free}"
        )


def decide(config: ModelConfig, mesh: Mesh, options: RunnerOptions) -> PoolSize:
    """As many blocks as were asked for or fit into memory, and no more than can be of use."""
    shape = MeshShape(**mesh.shape)
    block_bytes = _block_bytes(config, shape, options)
    if options.num_blocks is not None:
        free, num_blocks = None, options.num_blocks
    else:
        device = mesh.local_devices[0]
        fraction = options.memory_fraction or (0.25 if device.platform == "cpu" else 0.9)
        free = free_bytes(device, len(mesh.local_devices))
        # Twice what the slots can fill: as much again for prefixes of sequences that have gone.
        slots, longest = options.max_num_seqs // shape.dp, options.model_len(config)
        tokens = 2 * longest * slots
        if device.platform == "cpu" and options.memory_fraction is None:
            tokens = max(longest, min(tokens, USUAL * slots))
        useful = 1 + blocks_for(tokens, options.block_size)
        num_blocks = min(int(free * fraction) // block_bytes, useful)
        if num_blocks < 2:
            raise UsageError(
                f"memory-fraction={fraction} of {free / 2**20:,.0f} MiB free is less than two "
                f"blocks of {block_bytes / 2**20:,.1f} MiB; raise it or lower block-size"
            )
    return PoolSize(
        num_blocks=num_blocks,
        block_size=options.block_size,
        block_bytes=block_bytes,
        free_bytes=free,
    )


def free_bytes(device: Any, devices_a_host: int) -> int:
    """Memory a device has free; CPU devices share the host's."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024 // devices_a_host
    raise UsageError("the free memory is not known on this system; set --num-blocks")


def make(
    config: ModelConfig, mesh: Mesh, options: RunnerOptions, num_blocks: int, paging: Paging
) -> Pages:
    """Empty pages for all layers of a stage, those of one after those of the other."""
    shape = MeshShape(**mesh.shape)
    own_shapes = paging.shapes(
        config.num_hidden_layers // shape.pp * num_blocks,
        options.block_size,
        max(config.num_key_value_heads, shape.tp),
        (config.head_dim, config.value_dim),
    )
    dtype = paging.storage_dtype(kv_dtype(options))

    def zeros(own: tuple[int, ...], spec: P) -> jax.Array:
        sizes = (shape.pp, shape.dp, *own)
        sharding = NamedSharding(mesh, spec)
        return jax.jit(lambda: jnp.zeros(sizes, dtype), out_shardings=sharding)()

    return Pages(*map(zeros, own_shapes, paging.specs))


def kv_dtype(options: RunnerOptions) -> jnp.dtype:
    """Of keys and values as numbers."""
    return jnp.dtype(options.kv_dtype or options.dtype)


def _block_bytes(config: ModelConfig, mesh: MeshShape, options: RunnerOptions) -> int:
    heads = max(1, config.num_key_value_heads // mesh.tp)
    layers = config.num_hidden_layers // mesh.pp
    numbers = layers * options.block_size * heads * (config.head_dim + config.value_dim)
    return numbers * kv_dtype(options).itemsize
