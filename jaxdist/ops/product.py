"""The one matrix product under every op, and the only place that asks which backend multiplies.

Accumulation is fp32 everywhere. GPUs and TPUs take 16-bit operands as they are. CPUs differ: AMX
and AMD's AVX-512 BF16 multiply bf16 about twice as fast as fp32, while Intel's AVX-512 BF16
without AMX reaches 80 GFLOP/s on a core whose fp32 reaches 140. There 16-bit operands are widened
and fp32 ones (the master weights) taken unrounded: no product is less precise for it.
"""

import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import AxisType
from jax.typing import DTypeLike

Dims = tuple[int, ...]


def product(
    a: jax.Array,
    b: jax.Array,
    contract: tuple[Dims, Dims],
    batch: tuple[Dims, Dims] = ((), ()),
    *,
    compute_dtype: DTypeLike,
) -> jax.Array:
    """`lax.dot_general` in at least `compute_dtype`, with an fp32 result.

    The result's dims are the batch dims, then a's free dims, then b's. fp32 runs at the highest
    precision.
    """
    dims = (contract, batch)
    dtype = multiplied_dtype(compute_dtype)
    if dtype == jnp.bfloat16 and platform() == "cpu":
        return _bf16_on_cpu(a, b, dims)
    a, b = a.astype(dtype), b.astype(dtype)
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def multiplied_dtype(compute_dtype: DTypeLike) -> jnp.dtype:
    """The dtype to which `product` brings its operands; one that is used again is cast once."""
    dtype = jnp.dtype(compute_dtype)
    if platform() == "cpu" and not (dtype == jnp.bfloat16 and cpu_multiplies_bf16()):
        return jnp.dtype(jnp.float32)
    return dtype


def platform() -> str:
    """Where the code being traced will run: "cpu", "gpu", "tpu".

    The mesh's devices where there is one, which may be compiled for without being here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU multiplies bf16 faster than fp32.

    Read from the CPU's flags and never timed, so that a resumed run computes the same bits.
    """
    try:
        cpuinfo = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = set(cpuinfo.partition("\nflags")[2].partition("\n")[0].split())
    return "amx_bf16" in flags or ("AuthenticAMD" in cpuinfo and "avx512_bf16" in flags)


def _bf16_on_cpu(
    a: jax.Array, b: jax.Array, dims: tuple[tuple[Dims, Dims], tuple[Dims, Dims]]
) -> jax.Array:
    """bf16 x bf16 in the forms that XLA:CPU has fast kernels for.

    An `a` contracted over leading dims would be widened and multiplied in fp32, and a single row
    is ten times slower than two.
    """
    (contract_a, contract_b), (batch_a, batch_b) = dims
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)
    free_a = tuple(d for d in range(a.ndim) if d not in contract_a + batch_a)
    order = batch_a + free_a + contract_a
    if order != tuple(range(a.ndim)):
        a = jnp.transpose(a, order)
        if not _partitioned():
            # A transpose that stays a view of column-major data is contracted over leading dims.
            a = with_layout_constraint(a, Layout(major_to_minor=tuple(range(a.ndim))))
    num_batch, num_free = len(batch_a), len(free_a)
    rows = a.shape[num_batch : num_batch + num_free]
    one_row = num_free > 0 and all(size == 1 for size in rows)
    if one_row:
        a = jnp.concatenate([a, a], axis=num_batch)
    contract_a = tuple(range(num_batch + num_free, a.ndim))
    out = jax.lax.dot_general(
        a,
        b,
        ((contract_a, contract_b), (tuple(range(num_batch)), batch_b)),
        preferred_element_type=jnp.float32,
    )
    return jax.lax.slice_in_dim(out, 0, 1, axis=num_batch) if one_row else out


def _partitioned() -> bool:
    """Whether the partitioner may shard arrays here; it would gather one with a fixed layout."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 for size, kind in axes if kind != AxisType.Manual)
