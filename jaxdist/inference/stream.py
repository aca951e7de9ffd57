"""One text at a time, as it grows, from an engine that does nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import jax

from jaxdist import platform
from jaxdist.config import MeshShape
from jaxdist.inference.device.default_mesh import mesh_for
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions
from jaxdist.inference.load import Source, load_engine
from jaxdist.inference.sampling.sampling_params import SamplingParams


def load_for_one(
    source: Source,
    mesh: MeshShape | None,
    dtype: str,
    length: int | None = None,
    quantization: str | None = None,
) -> Engine:
    """An engine for one text of at most `length` tokens (by default the model's most).

    mesh: None for that of `default_mesh`. Programs are compiled as they are first needed.
    UsageError where the mesh does not fit.
    """
    options = RunnerOptions(dtype=dtype, quantization=quantization)
    mesh = mesh_for(mesh, source.config, options)
    if quantization is not None:
        source.check_packed(mesh)
    if jax.default_backend() == "cpu":
        platform.keep_freed_memory()
    # A replica needs a slot, though only one of them writes.
    options = replace(options, max_num_seqs=mesh.dp)
    num_blocks = -(-(length or options.model_len(source.config)) // options.block_size) + 2
    options = replace(options, num_blocks=num_blocks)
    options.check(source.config, mesh)
    return load_engine(
        source, mesh=mesh, runner_options=options, engine_options=EngineOptions(), warm=False
    )


def stream(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Iterator[str]:
    """The continuation of `prompt` in pieces; the request ends with the iterator.

    RequestError where the prompt does not fit.
    """
    request_id, given = "stream", 0
    engine.add_request(request_id, prompt, params)
    try:
        while engine.has_unfinished_requests():
            for output in engine.step():
                text = output.outputs[0].text
                yield text[given:]
                given = len(text)
    finally:
        engine.abort_request(request_id)
