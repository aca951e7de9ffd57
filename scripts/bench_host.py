"""What the engine's host side costs a decode step: scheduling, detokenizing, outputs; no device.

    python scripts/bench_host.py [TOKENIZER]

The runner gives random tokens at once, and its time is taken off. TOKENIZER as `data.tokenizer`; by
default a byte-level BPE is trained on the texts that come with jaxdist. Processor time of the
engine's thread, the best of several runs, with an output for each token, as a server has it.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import jaxdist.data
from jaxdist.config import one_line_errors
from jaxdist.data.tokenizer import Tokenizer, load_tokenizer
from jaxdist.inference.engine import Engine
from jaxdist.inference.sampling.sampling_params import SamplingParams
from jaxdist.inference.scheduling.step import NewSequence, Row, RowResult

TARGETS_US = {1: 100, 16: 1000, 64: 4000}
PROMPT_TOKENS, RUNS, STEPS = 500, 12, 25


class RandomRunner:
    """As `jaxdist.inference.scheduling.step.Runner`; `seconds` is what it takes itself."""

    block_size, num_replicas, max_model_len, max_row_tokens = 16, 1, 1024, 512
    hidden_size = 8

    def __init__(self, vocab_size: int, max_num_seqs: int):
        self.vocab_size, self.max_num_seqs = vocab_size, max_num_seqs
        self.num_blocks = 1 + max_num_seqs * self.max_model_len // self.block_size
        self.seconds = 0.0

    def start(self, slot: int, sequence: NewSequence) -> None:
        del slot, sequence

    def stop(self, slot: int) -> None:
        del slot

    def launch(self, rows: Sequence[Row]) -> list[bool]:
        return [row.sample for row in rows]

    def sample(self, launched: list[bool], masks: Mapping[int, np.ndarray | None]) -> None:
        raise AssertionError("no text here is held to a grammar")

    def wait(self, launched: list[bool]) -> list[RowResult]:
        began = time.thread_time()
        results = [
            RowResult(token_ids=[random.randrange(300, self.vocab_size)] if sampled else ())
            for sampled in launched
        ]
        self.seconds += time.thread_time() - began
        return results


def trained() -> Tokenizer:
    """A byte-level BPE of 8,000 tokens."""
    import tokenizers

    inner = tokenizers.ByteLevelBPETokenizer()
    texts = Path(jaxdist.data.__path__[0], "embedded").glob("*.txt")
    inner.train([str(text) for text in texts], vocab_size=8000, show_progress=False)
    with tempfile.TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        return load_tokenizer(f"{folder}/tokenizer.json")


def seconds_a_step(tokenizer: Tokenizer, batch: int, params: SamplingParams) -> float:
    """Host seconds of a step that decodes `batch` sequences."""
    runner = RandomRunner(tokenizer.vocab_size, batch)
    engine = Engine(runner, tokenizer)
    for i in range(batch):
        prompt = [random.randrange(300, tokenizer.vocab_size) for _ in range(PROMPT_TOKENS)]
        engine.add_request(str(i), prompt, params)
    while engine.counters.generation_tokens < 2 * batch:
        engine.step()
    times = []
    for _ in range(RUNS):
        began, own = time.thread_time(), runner.seconds
        for _ in range(STEPS):
            engine.step()
        times.append(time.thread_time() - began - (runner.seconds - own))
    return min(times) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tokenizer", nargs="?", help="as data.tokenizer [trained here]")
    options = parser.parse_args()
    with one_line_errors("bench_host"):
        measure(load_tokenizer(options.tokenizer) if options.tokenizer else trained())


def measure(tokenizer: Tokenizer) -> None:
    """Print the host's time of a step at each batch size, beside its target."""
    print("batch  plain us  with 2 stop texts us  target us")
    for batch, target in TARGETS_US.items():
        params = [
            SamplingParams(seed=0, max_tokens=500, ignore_eos=True, stop=stop)
            for stop in ((), ("\n\nUser:", "<end of it>"))
        ]
        plain, stops = (1e6 * seconds_a_step(tokenizer, batch, one) for one in params)
        print(f"{batch:5}  {plain:8.0f}  {stops:20.0f}  {target:9}")


if __name__ == "__main__":
    main()
