"""What a contender runs: a model shape, a batch, a framework and its settings.

Read by every worker, so neither JAX nor torch nor jaxdist is imported here.
"""

import json
from dataclasses import asdict, dataclass, field
from itertools import cycle, islice
from typing import Any

import numpy as np

NUM_BATCHES = 4  # the same few batches over and over: the loss must fall on them
LEARNING_RATE, BETAS, WEIGHT_DECAY, MAX_GRAD_NORM = 3e-4, (0.9, 0.95), 0.1, 1.0
INITIALIZER_RANGE = 0.02


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama with a tied head, and the global batch of one step."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rows: int  # sequences in a step
    length: int  # tokens in a sequence

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.rows * self.length

    def model_fields(self) -> dict[str, Any]:
        """The model's fields as Hugging Face and jaxdist both name them."""
        sizes = {k: v for k, v in asdict(self).items() if k not in ("rows", "length")}
        return sizes | {
            "max_position_embeddings": self.length,
            "tie_word_embeddings": True,
            "initializer_range": INITIALIZER_RANGE,
        }

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The data: (tokens, labels), int64 [rows, length], NUM_BATCHES times.

        Token i has the odds 1 / (i + 1), as words by their rank (Zipf).
        """
        rng = np.random.default_rng(0)
        odds = 1 / np.arange(1, self.vocab_size + 1)
        shape = (NUM_BATCHES, self.rows, self.length + 1)
        text = rng.choice(self.vocab_size, shape, p=odds / odds.sum())
        return [(rows[:, :-1], rows[:, 1:]) for rows in text]


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One contender, as it travels to its process."""

    framework: str  # jaxdist, torch or deepspeed
    shape: Shape
    precision: str  # fp32, or bf16 with fp32 masters
    job: str = "train"  # or compile: a turn then compiles the step once and runs nothing
    device: str = "cpu"  # or gpu
    mesh: str = "1x1x1"  # jaxdist's; more than one device is simulated
    num_microbatches: int = 1  # jaxdist's
    compiled: bool = False  # torch.compile
    keep_freed_memory: bool = False  # glibc's allocator; jaxdist asks for it by itself
    python: str = field(default="", compare=False)  # interpreter; empty takes the parent's

    @property
    def title(self) -> str:
        """What a reader calls it."""
        if self.job == "compile":
            return f"{self.shape.num_hidden_layers} layers"
        if self.framework == "jaxdist":
            return f"jaxdist {self.mesh}"
        kind = {"torch": "torch compile" if self.compiled else "torch eager"}
        name = kind.get(self.framework, self.framework)
        return name + (" +alloc" if self.keep_freed_memory else "")

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Spec":
        fields = json.loads(text)
        return cls(**fields | {"shape": Shape(**fields["shape"])})


class Feed:
    """Endless batches, made ready for the device by `place`."""

    def __init__(self, placed: list):
        self._batches = cycle(placed)

    def take(self, count: int) -> list:
        """The next `count` batches."""
        return list(islice(self._batches, count))
