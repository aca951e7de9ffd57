"""llama.cpp's part of compare_llamacpp.py, for an interpreter that has llama-cpp-python only.

python scripts/llamacpp_worker.py REQUEST.json ANSWER.npz
"""

import json
import sys

import llama_cpp  # pyright: ignore[reportMissingImports]
import numpy as np

F32 = 0  # ggml's number of the type


def main() -> None:
    """Continue each prompt greedily, score each window, save what came out."""
    with open(sys.argv[1]) as file:
        request = json.load(file)
    longest = max(map(len, request["windows"] + request["prompts"])) + request["tokens"]
    model = llama_cpp.Llama(
        request["model"],
        n_ctx=longest,
        n_batch=longest,
        n_threads=1,  # threads that wait for each other spin, and starve on a busy machine
        n_threads_batch=1,
        logits_all=True,
        type_k=F32,
        type_v=F32,
        verbose=False,
    )
    continued = [greedy(model, prompt, request["tokens"]) for prompt in request["prompts"]]
    logits = scores(model, request["prompts"][0])
    losses = [loss(model, window) for window in request["windows"]]
    np.savez(sys.argv[2], continued=continued, logits=logits, losses=losses)


def scores(model: llama_cpp.Llama, tokens: list[int]) -> np.ndarray:
    """Logits after each token, [T, V]."""
    model.reset()
    model.eval(tokens)
    return model.scores[: len(tokens)].copy()


def greedy(model: llama_cpp.Llama, prompt: list[int], count: int) -> list[int]:
    """The `count` likeliest tokens, one after the other."""
    model.reset()
    model.eval(prompt)
    found: list[int] = []
    while True:
        found.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        if len(found) == count:
            return found
        model.eval(found[-1:])


def loss(model: llama_cpp.Llama, tokens: list[int]) -> float:
    """Mean negative log likelihood of every token but the first, in nats."""
    logits = scores(model, tokens)[:-1].astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(axis=1))
    return float(np.mean(log_sums - logits[np.arange(len(logits)), tokens[1:]]))


if __name__ == "__main__":
    main()
