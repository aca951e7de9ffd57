"""Decoding speed on one GPU: how much of its memory bandwidth is used, in under 4 minutes.

    python scripts/bench_serve_gpu.py [--bandwidth GB_PER_S] [--json FILE]

Llama 3.2's 1B shape with random weights in bf16, batches of 1, 16 and 64 sequences about 2,048
tokens long. A step must read all weights and all keys and values; the goal is that it takes no
longer than that takes at 70 % of the bandwidth on the card's data sheet. The engine and
transformers' `generate`, if it is there, have the card to themselves, one after the other.
Exit code 2 where JAX sees no GPU.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from bench.child import Child, ContenderFailed, replies
from bench.serving.gpu_worker import DecodeSpec
from bench_gpu import SHAPE, gpu

from jaxdist.planner.hardware import hardware_named

BATCHES = (1, 16, 64)
CONTEXT, NUM_STEPS = 2048, 48
GOAL = 0.7
BUDGET = 225  # seconds of everything, of which a contender that starts needs some
NEEDED = 40
KV_BYTES = 2  # of one number


def main() -> int:
    """Run both contenders; 1 where jaxdist failed, 2 where there is no GPU."""
    deadline = time.monotonic() + BUDGET
    options = _options()
    if not (device := gpu()):
        print("bench_serve_gpu: no GPU that JAX can see; nothing to measure here", file=sys.stderr)
        return 2
    bandwidth = 1e9 * options.bandwidth if options.bandwidth else bandwidth_of(device)
    known = f"{bandwidth / 1e9:,.0f} GB/s" if bandwidth else "bandwidth not known; --bandwidth"
    print(f"{device} ({known}): context {CONTEXT}, bf16; goal: {GOAL:.0%} of the bandwidth")
    fields = SHAPE.model_fields() | {"max_position_embeddings": 2 * CONTEXT}
    results = {}
    for framework in ("jaxdist", "transformers"):
        spec = DecodeSpec(
            framework=framework, fields=fields, context=CONTEXT, steps=NUM_STEPS, batches=BATCHES
        )
        results[framework] = measured(spec, deadline)
        for result in results[framework]:
            print(result.line(bandwidth, results["jaxdist"]), flush=True)
    if options.json:
        record = {
            name: [result.to_json(bandwidth) for result in some] for name, some in results.items()
        }
        record |= {"device": device, "bandwidth": bandwidth}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(result.problem for result in results["jaxdist"]))


def bandwidth_of(device: str) -> float | None:
    """Bytes a second of a device of this name, by its data sheet; None where it is not known."""
    hardware = hardware_named(device)
    return 1e9 * hardware.memory_gb_per_second if hardware else None


def kv_bytes_per_token(fields: dict) -> int:
    """Bytes of the keys and values of one token in all layers."""
    head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    return 2 * fields["num_hidden_layers"] * fields["num_key_value_heads"] * head_dim * KV_BYTES


@dataclass(frozen=True, kw_only=True)
class Result:
    """One batch size of one contender."""

    spec: DecodeSpec
    batch: int
    seconds: tuple[float, ...] = ()  # of each step
    context: float = 0.0  # mean tokens of a sequence meanwhile
    weight_bytes: int = 0
    problem: str = ""

    @property
    def step(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    def roofline(self, bandwidth: float | None) -> float | None:
        """The share of the bandwidth that a step reaches: what it must read, over its time."""
        if not self.seconds or not bandwidth:
            return None
        kv = self.batch * self.context * kv_bytes_per_token(self.spec.fields)
        return (self.weight_bytes + kv) / self.step / bandwidth

    def line(self, bandwidth: float | None, ours: list["Result"]) -> str:
        """One row for the reader; `ours` are jaxdist's results."""
        title = f"{self.spec.framework:<12} batch {self.batch:>2}"
        if not self.seconds:
            return f"{title}  not run: {self.problem}"
        text = f"{title}  {self.batch / self.step:>8,.0f} tokens/s, {1e3 * self.step:.2f} ms a step"
        if (share := self.roofline(bandwidth)) is not None:
            text += f", {share:.1%} of the bandwidth"
        if self.spec.framework == "jaxdist":
            return text + ("" if share is None else "  met" if share >= GOAL else "  MISSED")
        same = [result for result in ours if result.batch == self.batch and result.seconds]
        if same:
            text += f", jaxdist is {self.step / same[0].step:.2f} times as fast"
        return text

    def to_json(self, bandwidth: float | None) -> dict:
        """The figures."""
        return {
            "batch": self.batch,
            "seconds": self.seconds,
            "context": self.context,
            "tokens_per_second": self.batch / self.step if self.seconds else None,
            "roofline": self.roofline(bandwidth),
            "problem": self.problem,
        }


def measured(spec: DecodeSpec, deadline: float) -> list[Result]:
    """Each batch size: once to compile and warm up, once to count."""
    if deadline - time.monotonic() < NEEDED:
        return [Result(spec=spec, batch=batch, problem="the time is up") for batch in spec.batches]
    scripts = Path(__file__).resolve().parent
    paths = [str(scripts), str(scripts.parent), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    if spec.device == "gpu":
        env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # it has the card to itself
    child = Child([sys.executable, "-m", "bench.serving.gpu_worker", spec.to_json()], env)
    results: list[Result] = []
    try:
        about = replies([child], deadline)[0]
        for batch in spec.batches:
            for _ in range(2):
                child.send(str(batch))
                reply = replies([child], deadline)[0]
            results.append(
                Result(
                    spec=spec,
                    batch=batch,
                    seconds=tuple(reply["seconds"]),
                    context=reply["context"],
                    weight_bytes=about["weight_bytes"],
                )
            )
    except ContenderFailed as failure:
        left = spec.batches[len(results) :]
        results += [Result(spec=spec, batch=batch, problem=str(failure)) for batch in left]
    finally:
        child.close(patience=0)
    return results


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bandwidth", type=float, help="of the card, in place of its data sheet's")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
