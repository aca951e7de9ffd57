"""Compiling all that a runner may ever run, before the first request comes.

Each program runs once on rows of nothing but padding, which write to the null block: that also
finds what a backend can compile and not execute.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import jax

from jaxdist.inference.buckets import PROMPT_QUERIES, Shape
from jaxdist.inference.launches import Launch
from jaxdist.inference.model_runner import ModelRunner
from jaxdist.inference.sampling_params import SamplingParams
from jaxdist.inference.step import NewSequence
from jaxdist.inference.step_data import StepData

Progress = Callable[[int, int, str], None]  # programs compiled, of how many, what comes next


def warm_up(runner: ModelRunner, progress: Progress | None = None) -> int:
    """Compile the runner's programs, of which there is a computed, bounded list; how many."""
    work = programs(runner)
    for number, (name, compile_it) in enumerate(work):
        if progress is not None:
            progress(number, len(work), name)
        with jax.set_mesh(runner.mesh):
            jax.block_until_ready(compile_it())
    if progress is not None:
        progress(len(work), len(work), "ready")
    runner.is_warm()
    return len(work)


def programs(runner: ModelRunner) -> list[tuple[str, Callable[[], Any]]]:
    """Name and a first run of each program. To be run in order: some prepare for others."""
    sequence = NewSequence(prompt_ids=[0], params=SamplingParams(seed=0))
    work: list[tuple[str, Callable[[], Any]]] = [
        ("a sequence's start", lambda: runner.write_slot(0, sequence))
    ]
    sampled: set[tuple[int, int]] = set()
    for shape in runner.buckets.shapes:
        work.append((str(shape), _forward(runner, shape)))
        if (shape.rows, shape.scored) not in sampled:
            sampled.add((shape.rows, shape.scored))
            work += _samplers(runner, shape)
        if shape.queries == PROMPT_QUERIES and shape.width == runner.buckets.widths[0]:
            work += _prompt_outputs(runner, shape)
    return work


def _forward(runner: ModelRunner, shape: Shape) -> Callable[[], Any]:
    return lambda: runner.compute(_padding(runner, shape)).x


def _samplers(runner: ModelRunner, shape: Shape) -> list[tuple[str, Callable[[], Any]]]:
    def run(plain: bool, logprobs: bool) -> Any:
        computed = runner.compute(_padding(runner, shape))
        return runner.draw(computed, plain=plain, logprobs=logprobs)

    return [
        (
            f"sampling {shape.rows} x {shape.scored}{'' if plain else ' by parameters'}"
            f"{' with logprobs' if logprobs else ''}",
            lambda plain=plain, logprobs=logprobs: run(plain, logprobs),
        )
        for plain, logprobs in product((True, False), (False, True))
    ]


def _prompt_outputs(runner: ModelRunner, shape: Shape) -> list[tuple[str, Callable[[], Any]]]:
    def run() -> Any:
        x = runner.compute(_padding(runner, shape)).x
        return runner.score(x, 0, []), runner.hidden(x, 0)

    return [(f"a prompt's logprobs and embedding, {shape.rows} rows", run)]


def _padding(runner: ModelRunner, shape: Shape) -> Launch:
    slots = runner.max_num_seqs // runner.num_replicas
    packed = StepData.padding(runner.num_replicas, slots, shape)
    return Launch(shape=shape, pieces=(), places=(), packed=packed)
