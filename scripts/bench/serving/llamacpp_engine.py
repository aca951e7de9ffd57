"""llama.cpp as a contender: its own batch API, one sequence a prompt, greedy.

For an interpreter that need have llama-cpp-python only. Weights are as the file has them, keys and
values fp16, as llama.cpp does by itself.
"""

import ctypes
import os
import time

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

from bench.serving.spec import EngineSpec

TRIAL_BATCH, TRIAL_STEPS = 4, 4


def start(spec: EngineSpec) -> "LlamaCpp":
    """Load the model and find the best number of threads."""
    return LlamaCpp(spec)


class LlamaCpp:
    """See `spec.Engine`."""

    def __init__(self, spec: EngineSpec):
        llama_cpp.llama_backend_init()
        path = spec.model.encode()
        self._model = llama_cpp.llama_model_load_from_file(
            path, llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {spec.model}")
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max = spec.max_num_seqs
        params.n_ctx = spec.max_num_seqs * spec.max_model_len  # divided among the sequences
        params.n_batch = 2048
        params.n_ubatch = 512
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context")
        self._most = params.n_batch
        self._batch = llama_cpp.llama_batch_init(self._most, 0, 1)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        threads = self._set_best_thread_count()
        self.about = {"llama_cpp": llama_cpp.__version__, "threads": threads}

    def counters(self) -> dict[str, float]:
        """None are kept."""
        return {}

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        """The likeliest tokens after each prompt."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        found = [[token] for token in self._prefill(prompts)]
        for _ in range(new_tokens - 1):
            step = [
                (ids[-1], len(prompt) + len(ids) - 1, seq, True)
                for seq, (prompt, ids) in enumerate(zip(prompts, found, strict=True))
            ]
            for ids, token in zip(found, self._decode(step), strict=True):
                ids.append(token)
        return found

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The token after each prompt; prompts go in together, as many as a batch holds."""
        entries = [
            (token, position, seq, position == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        found: list[int] = []
        for first in range(0, len(entries), self._most):
            found += self._decode(entries[first : first + self._most])
        return found

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Compute (token, position, sequence, whether to choose what follows) at once."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for i, (token, position, seq, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, seq, wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with {code}")
        return [self._likeliest(i) for i, entry in enumerate(entries) if entry[3]]

    def _likeliest(self, i: int) -> int:
        row = llama_cpp.llama_get_logits_ith(self._context, i)
        address = ctypes.cast(row, ctypes.POINTER(ctypes.c_float * self._vocab_size))
        return int(np.frombuffer(address.contents, np.float32).argmax())

    def _set_best_thread_count(self) -> int:
        """Keep the fastest of all cores and half of them."""
        cores = len(os.sched_getaffinity(0))
        prompts = [[1 + seq] * 8 for seq in range(TRIAL_BATCH)]
        seconds = {}
        for count in sorted({cores, max(1, cores // 2)}):
            llama_cpp.llama_set_n_threads(self._context, count, count)
            self.generate(prompts, 2)
            begin = time.perf_counter()
            self.generate(prompts, TRIAL_STEPS)
            seconds[count] = time.perf_counter() - begin
        best = min(seconds, key=seconds.__getitem__)
        llama_cpp.llama_set_n_threads(self._context, best, best)
        return best
