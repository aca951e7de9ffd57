"""What can be chosen about the engine's host side."""

from dataclasses import dataclass

from jaxdist.config import limits
from jaxdist.config.errors import UsageError
from jaxdist.inference.scheduling.step import Runner


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The defaults suit a server. What the device holds (blocks, slots) is the runner's to say.

    Attributes:
        max_num_batched_tokens: Most tokens of one replica in a step; prompts are cut to fit. None:
            two of the runner's longest rows, at least one token a slot.
        policy: "fcfs", first come first served, or "lpm", longest cached prefix first.
        enable_prefix_caching: Keep the blocks of what was computed for prompts that begin alike.
        run_ahead: Make a step before the results of the last are known.
        num_speculative_tokens: Most tokens guessed at a time from what the text repeats; 0: none.
        prompt_lookup_min, prompt_lookup_max: Tokens that must repeat for a guess, the longest
            tried first.
        default_max_tokens: Most tokens of an answer to a request that names no most; None goes to
            the end of the context.
        seed: Makes the seeds of requests that bring none reproducible; None draws them.
    """

    max_num_batched_tokens: int | None = None
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    run_ahead: bool = True
    num_speculative_tokens: int = 0
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    default_max_tokens: int | None = None
    seed: int | None = None

    def __post_init__(self):
        if self.max_num_batched_tokens is not None:
            limits.whole("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        limits.choice("policy", self.policy, ("fcfs", "lpm"))
        for name in ("enable_prefix_caching", "run_ahead"):
            limits.flag(name, getattr(self, name))
        limits.whole("num_speculative_tokens", self.num_speculative_tokens, 0, 16)
        limits.whole("prompt_lookup_min", self.prompt_lookup_min, 1, 16)
        limits.whole("prompt_lookup_max", self.prompt_lookup_max, self.prompt_lookup_min, 16)
        if self.default_max_tokens is not None:
            limits.whole("default_max_tokens", self.default_max_tokens, 1)
        if self.seed is not None:
            limits.whole("seed", self.seed, 0, 2**32 - 1)

    def token_budget(self, runner: Runner) -> int:
        """Tokens of one replica in a step. UsageError where its slots could not all go on."""
        slots = runner.max_num_seqs // runner.num_replicas
        if self.max_num_batched_tokens is None:
            return max(2 * runner.max_row_tokens, slots)
        if self.max_num_batched_tokens < slots:
            raise UsageError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than the {slots} "
                f"sequences of a replica; set it to at least {slots}, or lower max_num_seqs"
            )
        return self.max_num_batched_tokens
