"""Compiling all that a runner may ever run, before the first request comes.

Several programs compile at a time, each in a thread. Then each runs once on rows of nothing but
padding, which write to the null block: that also finds what a backend can compile and not execute.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from jaxdist.inference.device.buckets import PROMPT_QUERIES, Shape
from jaxdist.inference.device.call import Call, Computed
from jaxdist.inference.device.launches import Launch
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.step_data import StepData
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.step import NewSequence
from jaxdist.platform import num_cores

Progress = Callable[[int, int, str], None]  # programs compiled, of how many, what comes next
MOST_THREADS = 8  # each holds what its compilation needs


@dataclass(frozen=True, kw_only=True)
class Program:
    """Something to compile, and its first run. calls: What it compiles; nothing where it is small.

    Both may need what earlier rounds of `programs` have run.
    """

    name: str
    calls: Callable[[], Sequence[Call]] = tuple
    run: Callable[[], Any]


def warm_up(runner: ModelRunner, progress: Progress | None = None) -> int:
    """Compile the runner's programs, of which there is a computed, bounded list; how many."""
    rounds = programs(runner)
    count, done = sum(map(len, rounds)), 0
    pool = ThreadPoolExecutor(min(MOST_THREADS, num_cores()))
    try:
        for work in rounds:
            compiled = [pool.submit(_compile, runner, program) for program in work]
            for program, future in zip(work, compiled, strict=True):
                if progress is not None:
                    progress(done, count, program.name)
                future.result()
                with jax.set_mesh(runner.mesh):
                    jax.block_until_ready(program.run())
                done += 1
    finally:
        pool.shutdown(cancel_futures=True)
    if progress is not None:
        progress(count, count, "ready")
    runner.is_warm()
    return count


def _compile(runner: ModelRunner, program: Program) -> None:
    with jax.set_mesh(runner.mesh):
        for call in program.calls():
            call.compile()


def programs(runner: ModelRunner) -> list[list[Program]]:
    """All there is, in rounds: what a round compiles needs what the one before has run."""
    sequence = NewSequence(prompt_ids=[0], params=SamplingParams(seed=0))
    found: dict[Shape, Computed] = {}  # by forward passes
    start = Program(name="a sequence's start", run=lambda: runner.sampler.start(0, sequence))
    shapes = runner.buckets.shapes
    return [
        [start, *(_forward(runner, shape, found) for shape in shapes)],
        list(_after(runner, shapes, found)),
    ]


def _forward(runner: ModelRunner, shape: Shape, found: dict[Shape, Computed]) -> Program:
    def run() -> Any:
        found[shape] = runner.compute(_padding(runner, shape))
        return found[shape].x

    call = runner.compute_call(_padding(runner, shape))
    return Program(name=str(shape), calls=lambda: [call], run=run)


def _after(
    runner: ModelRunner, shapes: Sequence[Shape], found: dict[Shape, Computed]
) -> Iterator[Program]:
    """What follows the forward passes: once where they differ in nothing that it sees."""
    sampled: set[tuple[int, int]] = set()
    parameters: set[tuple[int, int]] = set()
    for shape in shapes:
        if (shape.rows, shape.scored) not in sampled:
            sampled.add((shape.rows, shape.scored))
            for logprobs in (False, True):
                yield _sampler(runner, shape, found, plain=True, logprobs=logprobs)
            key = runner.sampler.num_rows(shape.rows), shape.scored
            if key not in parameters:
                parameters.add(key)
                for logprobs in (False, True):
                    yield _sampler(runner, shape, found, plain=False, logprobs=logprobs)
            else:
                yield _widener(runner, shape, found)
        # A prompt's end stands among guesses where there are some.
        if shape.queries > 1 and shape.width == runner.buckets.widths[0]:
            yield _prompt_outputs(runner, shape, found)


def _sampler(
    runner: ModelRunner, shape: Shape, found: dict[Shape, Computed], *, plain: bool, logprobs: bool
) -> Program:
    sampler = runner.sampler
    return Program(
        name=f"sampling {shape.rows} x {shape.scored}{'' if plain else ' by parameters'}"
        f"{' with logprobs' if logprobs else ''}",
        calls=lambda: [sampler.call(found[shape], plain=plain, logprobs=logprobs)],
        run=lambda: sampler.draw(found[shape], plain=plain, logprobs=logprobs),
    )


def _widener(runner: ModelRunner, shape: Shape, found: dict[Shape, Computed]) -> Program:
    """What leads to the sampling by parameters of a larger shape."""
    return Program(
        name=f"sampling {shape.rows} x {shape.scored} by parameters among more rows",
        run=lambda: runner.sampler.draw(found[shape], plain=False),
    )


def _prompt_outputs(runner: ModelRunner, shape: Shape, found: dict[Shape, Computed]) -> Program:
    def calls() -> list[Call]:
        x = found[shape].x
        embeds = [runner.hidden_call(x, 0)] if shape.queries == PROMPT_QUERIES else []
        return [runner.score_call(x, 0, []), *embeds]

    return Program(
        name=f"a prompt's logprobs and embedding, {shape.rows} rows of {shape.queries} tokens",
        calls=calls,
        run=lambda: [call() for call in calls()],
    )


def _padding(runner: ModelRunner, shape: Shape) -> Launch:
    slots = runner.max_num_seqs // runner.num_replicas
    packed = StepData.padding(runner.num_replicas, slots, shape)
    return Launch(shape=shape, pieces=(), places=(), packed=packed)
