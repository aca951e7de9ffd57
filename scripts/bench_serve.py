"""Serving speed: load on any OpenAI endpoint, and jaxdist's engine against its peers.

    python scripts/bench_serve.py endpoint --url http://127.0.0.1:8000 --request-rate 4
    python scripts/bench_serve.py engine [--llama-python PATH]      about 25 minutes on two cores
    python scripts/bench_serve.py [--quick] [--llama-python PATH]   engine is the default

`endpoint` streams completions from any server and tells throughput, TTFT, TPOT, ITL and goodput.
`engine` lets engines take turns (A B C A B C) in processes of their own on SmolLM2-135M, the same
bf16 weights for all, so that a machine which slows down slows all; ratios are of turns of one
round. Peers: transformers in the faster of bf16 and fp32; llama.cpp and vLLM where an interpreter
has them. `--help` after either word lists the options.
"""

import signal
import sys

from bench.serving import endpoint, engines


def main() -> int:
    """Run the part that the first word names; returns the exit code."""
    # A parent that is told to end leaves by its `with` blocks, which end what it has started.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    words = sys.argv[1:]
    if words and words[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    parts = {"endpoint": endpoint.main, "engine": engines.main}
    part = parts.get(words[0]) if words else None
    try:
        return part(words[1:]) if part else engines.main(words)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
