"""The engine's programs as GPUs run them: their pages on the CPU, and compiled for an H100."""

import re
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import MeshShape
from jaxdist.inference.device import kv_pool, model_runner, paging
from jaxdist.inference.device.buckets import PROMPT_QUERIES, Shape
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.device.step_data import FIELDS
from jaxdist.inference.weights import placement
from jaxdist.ops import paged_attention_gpu
from jaxdist.parallel.mesh import make_mesh
from jaxdist.planner.compiled import devices, has_cuda_compiler, kernels_of
from jaxdist.planner.hardware import Target
from tests.inference.small_host import Host, runner_of, serve

PROMPTS = ([3, 1, 4, 1, 5], list(range(1, 50)), [7, 7])


def texts(runner: ModelRunner) -> list[list[int]]:
    return serve(Host(runner, np.random.default_rng(1)), PROMPTS, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "dtype", "fields"),
    [
        ("1x1x4", "float32", {}),
        ("1x2x1", "float32", {"sliding_window": 5, "sliding_window_pattern": 2}),
        ("1x1x2", "bfloat16", {"head_dim": 16}),
    ],
)
def test_their_pages_and_weights_change_no_token(mesh, dtype, fields, model_of, monkeypatch):
    model = model_of(max_position_embeddings=64, **fields)
    expected = texts(runner_of(model, mesh, dtype=dtype))
    kernel = partial(paged_attention_gpu.kernel_attention, interpret=True)
    monkeypatch.setattr(paged_attention_gpu, "kernel_attention", kernel)
    monkeypatch.setattr(model_runner, "paging_of", lambda mesh: paging.GPU)
    monkeypatch.setattr(placement, "platform_of", lambda mesh: "gpu")
    assert texts(runner_of(model, mesh, dtype=dtype)) == expected


@pytest.mark.slow
@pytest.mark.skipif(not has_cuda_compiler(), reason="no CUDA plugin of JAX is installed")
@pytest.mark.parametrize("mesh", ["1x1x1", "2x2x2"])
def test_programs_are_compiled_for_an_h100(mesh, model_of, monkeypatch):
    """Decoding runs the kernel, a prompt cuDNN's attention; neither copies pool or weights."""
    monkeypatch.setattr(placement, "platform_of", lambda mesh: "gpu")
    model = model_of(max_position_embeddings=256, head_dim=64)
    runner = runner_of(model, mesh, dtype="bfloat16", block_size=16, num_blocks=4096)
    target = Target.parse(f"h100:{runner.mesh.size}")
    gpus = make_mesh(MeshShape.parse(mesh), devices=devices(target))
    forward = replace(runner._forward, mesh=gpus, paging=paging.paging_of(gpus))
    assert forward.paging is paging.GPU

    def abstract(arrays, specs):
        return jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(gpus, s)),
            arrays,
            specs,
        )

    options = RunnerOptions(num_blocks=4096, dtype="bfloat16")
    empty = partial(kv_pool.make, runner.config, gpus, options, 4096, paging.GPU)
    pages = jax.eval_shape(empty)
    pages = abstract(pages, type(pages)(*paging.GPU.specs))
    largest = max(a.size * a.dtype.itemsize for a in jax.tree.leaves(pages))
    weights = forward.weights
    for queries, call in ((1, "xla.gpu.triton"), (PROMPT_QUERIES, "__cudnn$fmha")):
        size = Shape(2, queries, 64)  # wider than the first copies
        ints = partial(np.zeros, dtype=np.int32)
        packed = ints((MeshShape.parse(mesh).dp * size.rows, queries + size.width + FIELDS))
        arguments = (
            abstract(weights.arrays, weights.specs),
            abstract(runner._rope, jax.tree.map(lambda a: P(), runner._rope)),
            pages,
            abstract(ints(4), P("dp")),
            abstract(packed, P("dp")),
        )
        with jax.set_mesh(gpus), kernels_of(target.hardware):
            program = jax.jit(forward.program(size), donate_argnums=2).lower(*arguments)
            compiled = program.compile()
        text = compiled.as_text()
        assert call in text
        # A weight that is copied comes out of a slice.
        assert not re.search(r"= bf16\[(1,)?32,\d+\]\S* (dynamic-)?slice\(", text)
        assert compiled.memory_analysis().temp_size_in_bytes < largest // gpus.size
