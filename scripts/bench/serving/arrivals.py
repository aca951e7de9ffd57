"""When requests come, and what they ask: everything drawn from a seed."""

from collections.abc import Sequence

import numpy as np

WORDS = "the of and to in is it for on with as at by from this that be are was or an not".split()


def arrival_times(count: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds after the start at which each of `count` requests is sent, [count].

    rate: Requests a second of a Poisson process; infinite: all at once.
    """
    if np.isinf(rate):
        return np.zeros(count)
    return np.cumsum(rng.exponential(1 / rate, count))


def random_ids(
    count: int, num_tokens: int, shared: int, vocab_size: int, rng: np.random.Generator
) -> list[list[int]]:
    """Prompts of random token ids; the first `shared` tokens of all are the same.

    Ids come from the upper half of the vocabulary, where no control token is likely.
    """
    low = vocab_size // 2
    common = rng.integers(low, vocab_size, shared).tolist()
    own = rng.integers(low, vocab_size, (count, num_tokens - shared)).tolist()
    return [common + tail for tail in own]


def random_words(count: int, num_words: int, shared: int, rng: np.random.Generator) -> list[str]:
    """Prompts of short English words, each about a token; the first `shared` are the same."""
    common = rng.choice(WORDS, shared).tolist()
    return [" ".join(common + rng.choice(WORDS, num_words - shared).tolist()) for _ in range(count)]


class Texts:
    """Pieces of one long text as prompts, so that a model knows what comes next."""

    def __init__(self, ids: Sequence[int]):
        self._ids = list(ids)

    def prompts(self, count: int, num_tokens: int, seed: Sequence[int]) -> list[list[int]]:
        """`count` pieces of `num_tokens` ids, none of which begins where another does."""
        rng = np.random.default_rng(seed)
        starts = rng.choice(len(self._ids) - num_tokens, count, replace=False)
        return [self._ids[start : start + num_tokens] for start in starts]
