"""A scheduler's part in small, and the training model's answers, for tests of the model runner."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.config import MeshShape
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.step import PENDING, NewSequence, Row, RowResult
from jaxdist.models import Transformer

GREEDY = SamplingParams(temperature=0.0, seed=0)


class Host:
    """A scheduler's part in small: blocks in any order, sequences driven step by step."""

    def __init__(self, runner: ModelRunner, rng: np.random.Generator):
        self.runner, self.rng = runner, rng
        share = runner.max_num_seqs // runner.num_replicas
        self.free = [
            rng.permutation(np.arange(1, runner.num_blocks)).tolist()
            for _ in range(runner.num_replicas)
        ]
        self.replica = [slot // share for slot in range(runner.max_num_seqs)]
        self.tables: dict[int, list[int]] = {}

    def start(self, slot: int, prompt: Sequence[int], params=GREEDY, pooling=None) -> None:
        self.runner.start(slot, NewSequence(prompt_ids=prompt, params=params, pooling=pooling))
        self.tables[slot] = []

    def stop(self, slot: int) -> None:
        self.runner.stop(slot)
        free = self.free[self.replica[slot]]
        free += self.tables.pop(slot)
        self.rng.shuffle(free)

    def row(self, slot: int, token_ids: Sequence[int], position: int, **fields: Any) -> Row:
        table, size = self.tables[slot], self.runner.block_size
        while len(table) * size < position + len(token_ids):
            table.append(self.free[self.replica[slot]].pop())
        return Row(
            slot=slot, token_ids=token_ids, position=position, block_table=[*table], **fields
        )

    def step(self, *rows: Row) -> list[RowResult]:
        return self.runner.wait(self.runner.launch(rows))


def runner_of(model: Transformer, mesh: str = "1x1x1", **options: Any) -> ModelRunner:
    """A runner of the model on a mesh; small pools, fp32."""
    defaults = {"block_size": 4, "num_blocks": 40, "max_num_seqs": 4, "dtype": "float32"}
    return ModelRunner(
        model.config,
        lambda like: placed(model, like),
        mesh=MeshShape.parse(mesh),
        options=RunnerOptions(**defaults | options),
    )


def placed(model: Transformer, like: Any) -> Any:
    """The model's arrays with the shardings of `like`, tables padded with zeros."""

    def put(array: jax.Array, struct: jax.ShapeDtypeStruct) -> jax.Array:
        pads = [(0, n - m) for n, m in zip(struct.shape, array.shape, strict=True)]
        padded = np.pad(np.asarray(array), pads).astype(struct.dtype)
        return jax.device_put(padded, struct.sharding)

    leaves = zip(jax.tree.leaves(model), jax.tree.leaves(like), strict=True)
    return jax.tree.unflatten(jax.tree.structure(like), [put(*pair) for pair in leaves])


def serve(host: Host, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts together, each step launched before the last one's result."""
    for slot, prompt in enumerate(prompts):
        host.start(slot, prompt)
    out = [
        list(r.token_ids) for r in host.step(*(host.row(s, p, 0) for s, p in enumerate(prompts)))
    ]
    launched = []
    for i in range(count - 1):
        rows = [host.row(s, [PENDING], len(p) + i) for s, p in enumerate(prompts)]
        launched.append(host.runner.launch(rows))
    for step in launched:
        for tokens, result in zip(out, host.runner.wait(step), strict=True):
            tokens += result.token_ids
    return out


def forward(model: Transformer, text: Sequence[int]) -> np.ndarray:
    """The training model's logits [T, V], computed at one length for all texts."""
    tokens = np.zeros((1, 64), np.int32)
    tokens[0, : len(text)] = text
    positions = np.minimum(np.arange(64), len(text) - 1)[None]
    return np.asarray(_forward(model, tokens, positions))[0, : len(text)]


_forward = jax.jit(Transformer.__call__)


def dense(model: Transformer, prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens by the training model, the whole text again for each."""
    text = list(prompt)
    for _ in range(count):
        text.append(int(forward(model, text)[-1].argmax()))
    return text[len(prompt) :]
