"""Made-up rows for benchmarks: no file, no tokenizer, every row full."""

import numpy as np

from jaxdist.data.packing import Batch

# An epoch of the synthetic source; any number would do, since each row is made when it is asked
# for.
NUM_ROWS = 1 << 20


class SyntheticRows:
    """Rows of independent tokens; token i has the odds 1 / (i + 1), as words by their rank (Zipf).

    A row is a pure function of (stream, row number). The loss of a model that learns falls to the
    entropy.
    """

    def __init__(self, *, vocab_size: int, length: int, stream: int):
        odds = 1.0 / np.arange(1, vocab_size + 1)
        self._below = np.cumsum(odds / odds.sum())
        self._vocab_size, self._length, self._stream = vocab_size, length, stream
        self.name = "synthetic"
        self.num_rows, self.num_tokens = NUM_ROWS, NUM_ROWS * length
        self.fingerprint = f"synthetic-{vocab_size}-{stream}"

    def write(self, row: int, out: Batch, at: int) -> None:
        """Fill row `at` of `out` with row number `row`."""
        uniform = np.random.default_rng([self._stream, row]).random(self._length + 1)
        # The last sum may be a rounding error below 1.
        tokens = np.minimum(
            np.searchsorted(self._below, uniform, side="right"), self._vocab_size - 1
        )
        out.tokens[at], out.labels[at] = tokens[:-1], tokens[1:]
        out.loss_mask[at] = out.segment_ids[at] = 1
        out.positions[at] = np.arange(self._length)
