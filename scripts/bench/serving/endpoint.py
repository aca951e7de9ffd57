"""`bench_serve.py endpoint`: load on a server that speaks OpenAI's API."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.serving.arrivals import arrival_times, random_ids, random_words
from bench.serving.client import Endpoint, EndpointError, Load, drive
from bench.serving.latency import parse_limits, summary, table


def main(argv: Sequence[str]) -> int:
    """Warm up, send, print; 1 where a request failed, 2 where nothing could be asked."""
    options = _parse(argv)
    endpoint = Endpoint(
        url=options.url,
        model=options.model,
        chat=options.api == "chat",
        api_key=options.api_key or os.environ.get("OPENAI_API_KEY"),
        timeout=options.timeout,
    )
    rng = np.random.default_rng(options.seed)
    count = options.num_prompts + options.num_warm_up
    sizes = (count, options.prompt_tokens, options.shared_tokens)
    prompts: list = (
        random_words(*sizes, rng)
        if endpoint.chat or options.text
        else random_ids(*sizes, options.vocab_size, rng)
    )
    warm, timed = prompts[: options.num_warm_up], prompts[options.num_warm_up :]
    arrivals = arrival_times(len(timed), options.request_rate, rng)
    try:
        if warm:
            drive(endpoint, _load(options, warm, np.zeros(len(warm))))
        figures = summary(
            drive(endpoint, _load(options, timed, arrivals)), parse_limits(options.goodput)
        )
    except EndpointError as error:
        print(f"bench_serve: {error}", file=sys.stderr)
        return 2
    print(table(figures))
    if options.json:
        asked = {k: v for k, v in vars(options).items() if k not in ("json", "api_key")}
        asked["request_rate"] = str(options.request_rate)  # JSON has no infinity
        options.json.write_text(json.dumps({"options": asked, **figures}, indent=1) + "\n")
    return int(figures["failed"] > 0)


def _load(options: argparse.Namespace, prompts: list, arrivals: np.ndarray) -> Load:
    return Load(
        prompts=prompts,
        arrivals=arrivals,
        max_tokens=options.output_tokens,
        max_concurrency=options.max_concurrency,
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench_serve.py endpoint", description=__doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="of the server, with or without /v1")
    add("--model", help="its name there; the first of /v1/models by default")
    add("--api", choices=("completions", "chat"), default="completions")
    add("--api-key", help="OPENAI_API_KEY by default")
    add("--num-prompts", type=int, default=100)
    add("--request-rate", type=float, default=float("inf"), metavar="N",
        help="a second, in a Poisson process; all at once by default")  # fmt: skip
    add("--max-concurrency", type=int, metavar="N", help="requests open at a time")
    add("--prompt-tokens", type=int, default=32)
    add("--shared-tokens", type=int, default=0, help="with which all prompts begin alike")
    add("--output-tokens", type=int, default=128, help="of each answer; its end is ignored")
    add("--text", action="store_true",
        help="prompts of words, for a server that takes no token ids")  # fmt: skip
    add("--vocab-size", type=int, default=32000, help="token ids of prompts are below it")
    add("--num-warm-up", type=int, default=4, metavar="N", help="requests that do not count")
    add("--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="limits of a good request, such as ttft:500 tpot:50 e2el:9000")  # fmt: skip
    add("--timeout", type=float, default=600.0, help="seconds of one request")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write all figures")
    options = parser.parse_args(argv)
    for name, least in (("num_prompts", 1), ("prompt_tokens", 1), ("output_tokens", 1),
                        ("num_warm_up", 0), ("shared_tokens", 0), ("vocab_size", 2)):  # fmt: skip
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} is less than {least}")
    if options.shared_tokens > options.prompt_tokens:
        parser.error("--shared-tokens is more than --prompt-tokens")
    if not options.request_rate > 0:
        parser.error("--request-rate is not more than 0")
    if options.max_concurrency is not None and options.max_concurrency < 1:
        parser.error("--max-concurrency is less than 1")
    try:
        parse_limits(options.goodput)
    except ValueError as error:
        parser.error(str(error))
    return options
