"""From a foreign model straight into arrays on a mesh.

Weights are taken one layer at a time: on the CPU into memory that the array then uses as it is, on
accelerators into the array itself. So what the host holds beyond the result is one tensor, and a
process reads, of a source whose `load` gives views, only what its own shards need.
"""

import mmap
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxdist.interop.leaves import stack_of

MOST_THREADS = 8  # copying is bound by memory bandwidth
ROWS = 4096  # of a table, that one thread copies at a time
HUGE = 4 << 20  # bytes from which memory is taken in huge pages


class WeightSource(Protocol):
    """A model by our names: a Hugging Face folder, a GGUF file, a run."""

    @property
    def config(self) -> Any:
        """The model's `ModelConfig` (perhaps a cached_property, which no type here fits)."""
        ...

    @property
    def tensor_names(self) -> Sequence[str]:
        """Names of the weights, as in `leaves`."""
        ...

    def load(self, name: str, layer: int | None = None) -> Any:
        """A weight (of a stack: one layer's), in any float dtype, perhaps as a view of a file.

        Layers are counted from the stack's first.
        """
        ...

    def weights(self) -> Iterator[tuple[str, int | None, np.ndarray]]:
        """(name, layer or None, array) of every weight."""
        ...


def load_parameters(source: WeightSource, like: Any) -> Any:
    """The parameters of `source` in the structure, dtypes and shardings of `like`.

    Args:
        source: Where the weights come from.
        like: A `Transformer` of `jax.ShapeDtypeStruct`s; one without a sharding goes to the default
            device. What a weight has beyond the source's (rows of the tables, heads) becomes zeros.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(
        like, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads) as pool:
        arrays = []
        for path, node in paths:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            (struct,) = jax.tree.leaves(node)
            arrays.append(_array(source, name, struct, pool))
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _array(
    source: WeightSource, name: str, like: jax.ShapeDtypeStruct, pool: ThreadPoolExecutor
) -> jax.Array:
    """One weight, whose stacked layers are read by several threads."""
    sharding = like.sharding or SingleDeviceSharding(jax.devices()[0])
    parts: dict[Any, _Part] = {}
    for device, index in sharding.addressable_devices_indices_map(like.shape).items():
        bounds = tuple(s.indices(n)[:2] for s, n in zip(index or (), like.shape, strict=True))
        # On the CPU devices with equal shards may share the memory, which nobody writes to again.
        key = bounds if device.platform == "cpu" else (device, bounds)
        parts.setdefault(key, _Part(bounds, like.dtype, [])).devices.append(device)
    for part in parts.values():
        part.allocate()
    if stack_of(name) is not None:
        layers = sorted({n for part in parts.values() for n in range(*part.bounds[0])})

        def read(layer: int) -> None:
            array = source.load(name, layer)
            for part in parts.values():
                part.put_layer(layer, array)

        on_cpu = all(part.host is not None for part in parts.values())
        # An accelerator's shard is updated in place, by one layer after the other.
        list(pool.map(read, layers) if on_cpu else map(read, layers))
    else:
        array = source.load(name)
        for part in parts.values():
            part.put(array, pool)
    shards = [shard for part in parts.values() for shard in part.shards()]
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards)


class _Part:
    """The part of a weight between `bounds` (first, last of each dim) on its way to devices."""

    def __init__(self, bounds: tuple[tuple[int, int], ...], dtype: Any, devices: list[Any]) -> None:
        self.bounds, self.dtype, self.devices = bounds, np.dtype(dtype), devices
        self.shape = tuple(last - first for first, last in bounds)
        self.host: np.ndarray | None = None
        self.device_array: jax.Array | None = None

    def allocate(self) -> None:
        """Take memory on the host, where that is the array's."""
        if self.devices[0].platform == "cpu":
            self.host = _memory(self.shape, self.dtype)

    def put_layer(self, layer: int, array: np.ndarray) -> None:
        """Take over the part of one layer of the stack."""
        first, last = self.bounds[0]
        if not first <= layer < last:
            return
        view = array[tuple(slice(*bounds) for bounds in self.bounds[1:])]
        if self.host is not None:
            _fill(self.host[layer - first], view)
            return
        stack = self.device_array
        if stack is None:
            with jax.default_device(self.devices[0]):
                stack = jnp.zeros(self.shape, self.dtype)
        piece = _memory(self.shape[1:], self.dtype)
        _fill(piece, view)
        stack = _set_row(stack, jax.device_put(piece, self.devices[0]), layer - first)
        stack.block_until_ready()  # else pieces queue up on the host
        self.device_array = stack

    def put(self, array: np.ndarray, pool: ThreadPoolExecutor) -> None:
        """Take over the part of a whole weight, by several threads."""
        view = array[tuple(slice(*bounds) for bounds in self.bounds)]
        target = _memory(self.shape, self.dtype) if self.host is None else self.host
        blocks = [slice(n, n + ROWS) for n in range(0, self.shape[0], ROWS)]
        list(pool.map(lambda rows: _fill(target[rows], view[rows]), blocks))
        if self.host is None:
            self.device_array = jax.device_put(target, self.devices[0])

    def shards(self) -> list[jax.Array]:
        """The finished array, once a device."""
        if self.device_array is not None:
            return [self.device_array]
        return [jax.device_put(self.host, device) for device in self.devices]


@partial(jax.jit, donate_argnums=0)
def _set_row(stack: jax.Array, piece: jax.Array, row: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, piece, row, 0)


def _memory(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Memory that JAX's CPU arrays can use as it is, in huge pages where there are any.

    Fresh memory is cleared by the kernel page by page, which costs several times the copy.
    """
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if num_bytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = np.empty(num_bytes + 64, np.uint8)
        start = -raw.ctypes.data % 64
        return raw[start : start + num_bytes].view(dtype).reshape(shape)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, dtype).reshape(shape)


def _fill(target: np.ndarray, source: np.ndarray) -> None:
    """Copy with a change of dtype; what the source lacks (of a padded table) becomes zero."""
    if target.shape != source.shape:
        target[...] = 0
        target = target[tuple(map(slice, source.shape))]
    if source.dtype == ml_dtypes.bfloat16 and target.dtype == np.float32:
        # fp32's upper half: a shift, which numpy does faster than the cast of a foreign dtype.
        bits, wide = source.view(np.uint16), target.view(np.uint32)
        np.left_shift(bits, np.uint32(16), out=wide, dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(target, source, casting="unsafe")
