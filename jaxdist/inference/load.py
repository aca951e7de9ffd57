"""From an opened model to an engine that serves it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from jaxdist.config import MeshShape, ModelConfig, UsageError
from jaxdist.config.json_text import read_object
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer
from jaxdist.inference.device.model_runner import ModelRunner
from jaxdist.inference.device.runner_options import RunnerOptions
from jaxdist.inference.device.warm_up import Progress, warm_up
from jaxdist.inference.engine import Engine
from jaxdist.inference.engine_options import EngineOptions


class Source(Protocol):
    """What is needed of an opened model; `training.model_source.ModelSource` is one."""

    @property
    def tokenizer(self) -> str | None:
        """As `load_tokenizer` takes it; None where there is none."""
        ...

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        ...

    def parameters(self, like: Any) -> Any:
        """The parameters in the structure, dtypes and shardings of `like`."""
        ...

    def packed_parameters(self, like: Any) -> Any:
        """The same with weights in the blocks of their file."""
        ...

    def check_packed(self, mesh: MeshShape) -> None:
        """UsageError where weights cannot stay in blocks, on this mesh."""
        ...

    def companions(self) -> dict[str, bytes]:
        """The small files that go with it, by name."""
        ...


def eos_ids(files: Mapping[str, bytes], tokenizer: Tokenizer | None) -> list[int]:
    """All tokens that end a text: the tokenizer's, and those of the generation config."""
    ids = set() if tokenizer is None or tokenizer.eos_id is None else {tokenizer.eos_id}
    for name in ("generation_config.json", "config.json"):
        try:
            told = read_object(files.get(name, b"{}"), name).get("eos_token_id")
        except UsageError:
            continue  # a damaged file ends no text
        told = told if isinstance(told, list) else [told]
        ids |= {i for i in told if isinstance(i, int) and not isinstance(i, bool) and i >= 0}
    return sorted(ids)


def load_engine(
    source: Source,
    *,
    mesh: MeshShape,
    runner_options: RunnerOptions,
    engine_options: EngineOptions,
    tokenizer: Tokenizer | None = None,
    warm: bool = True,
    progress: Progress | None = None,
) -> Engine:
    """Read the weights onto the mesh and compile what the engine runs.

    tokenizer: In place of the model's own. warm: False compiles as it comes, at the first use.
    progress: Is told of each program. The runner takes as many guesses as the engine makes.
    UsageError where model, mesh and options do not go together.
    """
    keeps = runner_options.quantization is not None
    if keeps:
        source.check_packed(mesh)
    if tokenizer is None and source.tokenizer is not None:
        tokenizer = load_tokenizer(source.tokenizer)
    drafts = max(runner_options.max_drafts, engine_options.num_speculative_tokens)
    runner_options = replace(runner_options, max_drafts=drafts)
    ends = eos_ids(source.companions(), tokenizer)
    runner = ModelRunner(
        source.config,
        source.packed_parameters if keeps else source.parameters,
        mesh=mesh,
        options=runner_options,
        vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        eos_ids=ends,
    )
    engine = Engine(runner, tokenizer, engine_options, eos_ids=ends)
    if warm:
        warm_up(runner, progress)
    return engine
