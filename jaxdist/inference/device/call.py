"""What is handed from the forward pass to the sampling, and programs that wait to be run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jax import Array


@dataclass(frozen=True, kw_only=True)
class Computed:
    """What a forward pass gives: D replicas, B rows of each, T queries of which X are scored."""

    logits: Array  # [D * B, X, V]
    x: Array  # [D * B, T, E], the residual stream's end
    rows: Array  # what the sampler must know of each


@dataclass(frozen=True)
class Call:
    """A program and what it is called with, to be run now or compiled beforehand."""

    program: Any  # of `jax.jit`
    args: tuple[Any, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)  # static arguments

    def __call__(self) -> Any:
        """Start it."""
        return self.program(*self.args, **self.fixed)

    def compile(self) -> None:
        """Compile it; from any thread, also where its arguments were given away meanwhile."""
        self.program.lower(*self.args, **self.fixed).compile()
