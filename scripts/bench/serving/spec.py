"""What a serving contender is, and what it is asked in a turn.

Read by every worker, so neither JAX nor torch nor jaxdist is imported here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

OWN_TOKENS = 16  # of a prompt whose beginning is shared
BLOCK_SIZE = 16  # jaxdist's; its pool is for all tasks, not for all memory, which others need too
POOL_TOKENS = 1 << 15


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """One contender, as it travels to its process.

    Attributes:
        framework: jaxdist, llamacpp, transformers, vllm, or http: jaxdist behind its server.
        model: A Hugging Face folder with bf16 weights; llama.cpp's: a GGUF file of them.
        max_num_seqs, max_model_len: Most sequences at a time, most tokens of one.
        mesh: jaxdist's.
        python: Interpreter; empty takes the parent's.
    """

    framework: str
    model: str
    max_num_seqs: int = 32
    max_model_len: int = 1024
    mesh: str = "auto"
    python: str = field(default="", compare=False)

    @property
    def title(self) -> str:
        """What a reader calls it."""
        names = {"llamacpp": "llama.cpp bf16", "vllm": "vLLM", "http": "jaxdist over HTTP"}
        return names.get(self.framework, self.framework)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EngineSpec":
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class Task:
    """Work of a turn: `batch` prompts at once, each continued by exactly `new_tokens`.

    shared: All prompts of all turns begin alike, and end in OWN_TOKENS tokens of their own.
    """

    batch: int
    prompt_tokens: int
    new_tokens: int
    shared: bool = False

    @property
    def tokens(self) -> int:
        """What speed is measured by: generated tokens, or those of the prompt if one is."""
        return self.batch * (self.new_tokens if self.new_tokens > 1 else self.prompt_tokens)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What came of a turn.

    Attributes:
        seconds: From handing the prompts over to the last token.
        tokens: Generated ids, a list for each prompt; None where only text is known.
        counts: How many were generated, for each prompt.
        counters: What the engine's own counters grew by, such as host_seconds, compilations.
    """

    seconds: float
    tokens: Sequence[Sequence[int]] | None = None
    counts: Sequence[int]
    counters: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """What a worker runs."""

    about: Mapping[str, Any]  # versions and settings that it found best

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest `new_tokens` tokens after each prompt, end-of-sequence ignored."""
        ...

    def counters(self) -> dict[str, float]:
        """Sums since the start that it keeps of itself."""
        ...
