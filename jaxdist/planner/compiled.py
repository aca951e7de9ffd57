"""Devices that are not here, to compile for: XLA's compilers need no driver and no accelerator.

A GPU is described to XLA by its figures; a TPU it knows by name. What the compiler says of memory
and collectives then holds for the machine; what it would say of speed does not. cuDNN's attention
is called as on the machine, though without cuDNN nobody knows its workspace (some MB).

XLA:TPU makes code for every kernel here, which takes most of the time: JAX_OPTIMIZATION_LEVEL=O1 in
the environment takes a third of it and sends the same; its memory may differ.
"""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from unittest.mock import patch

from jaxdist.config import UsageError
from jaxdist.planner.hardware import Hardware, Target

_CUDA_PLUGINS = ("xla_cuda13", "xla_cuda12")
_CUDNN = (9, 10, 1)  # assumed: the first that JAX has no reservations about


def devices(target: Target) -> list[Any]:
    """JAX devices of the machine, for a mesh that programs are compiled for.

    Raises:
        UsageError: The compiler is not installed, or refuses the shape.
    """
    require_compiler(target.hardware)
    from jax.experimental.topologies import get_topology_desc

    if target.hardware.platform == "tpu":
        return _tpus(target)
    shape = "x".join(map(str, (1, *target.shape)))  # slices x hosts x devices
    config = target_config(target.hardware)
    return get_topology_desc(platform="cuda", target_config=config, topology=shape).devices


def require_compiler(hardware: Hardware) -> None:
    """Raise `UsageError` with what to install where XLA's compiler for `hardware` is missing."""
    if hardware.platform == "tpu":
        if importlib.util.find_spec("libtpu") is None:
            raise UsageError(
                f"compiling for {hardware.kind} needs Google's compiler: pip install libtpu"
            )
    elif not has_cuda_compiler():
        release = version("jaxlib")
        raise UsageError(
            f"compiling for {hardware.kind} needs XLA's CUDA compiler (no driver, no GPU): "
            f"pip install --no-deps jax-cuda12-plugin=={release} jax-cuda12-pjrt=={release}"
        )


def has_cuda_compiler() -> bool:
    """Whether a CUDA plugin of JAX is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.{name}") for name in _CUDA_PLUGINS)


@contextmanager
def kernels_of(hardware: Hardware) -> Iterator[None]:
    """Trace as on `hardware`: JAX asks the GPU that is here whether cuDNN's attention can run.

    Where a later JAX asks in another way, XLA's own attention is compiled instead.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    from jaxdist.ops.attention import cudnn_is_there

    own = (0, 0) if hardware.gpu is None else hardware.gpu.compute_capability
    major, minor, bugfix = _CUDNN
    answers = {
        "check_cudnn_version": lambda: major * 10_000 + minor * 100 + bugfix,
        "check_compute_capability": lambda asked: own >= _capability(asked),
        "is_cuda_compute_capability_equal": lambda asked: own == _capability(asked),
    }
    if hardware.gpu is None or not all(hasattr(fused, name) for name in answers):
        yield
        return
    token = cudnn_is_there.set(True)
    try:
        with patch.multiple(fused, **answers):
            yield
    finally:
        cudnn_is_there.reset(token)


def target_config(hardware: Hardware) -> str:
    """XLA's GpuTargetConfigProto of a GPU, as text."""
    gpu = hardware.gpu
    if gpu is None:
        raise ValueError(f"{hardware.kind} is not a GPU")
    major, minor = gpu.compute_capability
    shared = gpu.shared_kib_per_multiprocessor * 1024
    # What follows from CUDA's programming model is the same for all compute capabilities here.
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "threads_per_core_limit": 2048,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
        "shared_memory_per_block": 48 * 1024,
        "shared_memory_per_block_optin": shared - 1024,
        "shared_memory_per_core": shared,
        "core_count": gpu.multiprocessors,
        "fpus_per_core": gpu.cores_per_multiprocessor,
        "clock_rate_ghz": gpu.clock_ghz,
        "l2_cache_size": gpu.l2_mib * 2**20,
        "memory_bandwidth": int(hardware.memory_gb_per_second * 1e9),
        "device_memory_size": hardware.memory_bytes,
    }
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items())
    return f"""gpu_device_info {{
{lines}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: {_CUDNN[0]} minor: {_CUDNN[1]} patch: {_CUDNN[2]} }}
device_description_str: "{hardware.name}"
"""


def _capability(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _tpus(target: Target) -> list[Any]:
    from jax.experimental.topologies import get_topology_desc

    # It asks no cloud where it is, and two programs may have it open; neither touches a chip.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")  # of this host; any will do
    try:
        return get_topology_desc(topology_name=str(target), platform="tpu").devices
    except Exception as error:  # libtpu's own kinds of error
        first = str(error).strip().split("\n")[0]
        raise UsageError(f"{target} is not a shape that libtpu knows: {first}") from None
