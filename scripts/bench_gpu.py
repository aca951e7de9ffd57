"""Training speed on one GPU: jaxdist against torch with its flash attention, in under 4 minutes.

    python scripts/bench_gpu.py [--rows 4] [--json FILE]

Llama 3.2's 1B shape, bf16 with fp32 masters, sequences of 4,096 tokens, no recomputation. The
contenders have the card to themselves, one after the other; one that runs out of memory tries again
with half the rows. torch and transformers are peers if they are there. The goal is an MFU of 55 %.
Exit code 2 where JAX sees no GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from bench.contender import Contender, ContenderFailed
from bench.spec import Shape, Spec

SHAPE = Shape(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    rows=4,
    length=4096,
)
BUDGET = 225  # seconds of everything, of which a contender that starts needs some
NEEDED = 45
NUM_WARMUP_STEPS, NUM_TURNS, NUM_STEPS = 3, 5, 4
GOAL = 0.55
PROBE = "import jax; d = jax.devices()[0]; print(d.device_kind if d.platform == 'gpu' else '')"


def main() -> int:
    """Run all contenders; 1 where jaxdist failed, 2 where there is no GPU."""
    deadline = time.monotonic() + BUDGET
    options = _options()
    if not (device := gpu()):
        print("bench_gpu: no GPU that JAX can see; nothing to measure here", file=sys.stderr)
        return 2
    print(f"{device}: {SHAPE.length} tokens a row, bf16; goal: MFU {GOAL:.0%}", flush=True)
    ours = Spec(
        framework="jaxdist",
        shape=replace(SHAPE, rows=options.rows),
        precision="bf16",
        device="gpu",
    )
    peer = replace(ours, framework="torch")
    results = []
    for spec in (ours, peer, replace(peer, compiled=True)):
        results.append(measured(spec, deadline))
        print(results[-1].line(results[0]), flush=True)
    if options.json:
        record = {"device": device, "results": [result.to_json() for result in results]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(not results[0].seconds)


def gpu() -> str:
    """Name of JAX's first GPU, asked by a process that then lets go of it; empty without one."""
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    return probe.stdout.strip() if probe.returncode == 0 else ""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A contender's turns."""

    spec: Spec
    seconds: tuple[float, ...] = ()  # of each turn of NUM_STEPS steps
    about: dict | None = None  # what the worker said of itself
    losses: tuple[float, ...] = ()
    problem: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of the median turn."""
        return self.spec.shape.tokens * NUM_STEPS / statistics.median(self.seconds)

    def line(self, ours: "Result") -> str:
        """One row for the reader; `ours` knows the FLOPs, the peak and what to compare with."""
        title = f"{self.spec.title:<14}"
        if not self.seconds:
            return f"{title} not run: {self.problem}"
        speed = self.tokens_per_second
        spread = (max(self.seconds) - min(self.seconds)) / statistics.median(self.seconds)
        text = f"{title} {speed:>9,.0f} tokens/s (spread {spread:.1%}), {self.spec.shape.rows} rows"
        if ours.about:
            mfu = speed * ours.about["flops_per_token"] / ours.about["peak_flops"]
            ratio = ours.tokens_per_second / speed
            text += f", MFU {mfu:.1%}, jaxdist is {ratio:.2f} times as fast"
        return text + f", loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}"

    def to_json(self) -> dict:
        """The figures."""
        return {
            "contender": self.spec.title,
            "rows": self.spec.shape.rows,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second if self.seconds else None,
            "about": self.about,
            "losses": self.losses,
            "problem": self.problem,
        }


def measured(spec: Spec, deadline: float) -> Result:
    """Let it warm up and take its turns; with half the rows where the memory is too small."""
    if deadline - time.monotonic() < NEEDED:
        return Result(spec=spec, problem="the time is up")
    try:
        contender = Contender(spec, deadline)
        try:
            contender.turn(NUM_WARMUP_STEPS)
            seconds = tuple(contender.turn(NUM_STEPS) for _ in range(NUM_TURNS))
        finally:
            contender.close()
    except ContenderFailed as failure:
        if failure.out_of_memory and spec.shape.rows > 1:
            halved = replace(spec.shape, rows=spec.shape.rows // 2)
            return measured(replace(spec, shape=halved), deadline)
        return Result(spec=spec, problem=str(failure))
    return Result(spec=spec, seconds=seconds, about=contender.about, losses=tuple(contender.losses))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=SHAPE.rows, help="sequences in a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
