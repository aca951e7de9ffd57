"""Training speed on the CPU: jaxdist against its peers and against itself, on one mesh or another.

    python scripts/bench_train.py                     all of it, about 40 minutes on two cores
    python scripts/bench_train.py --quick             the 15M shape, in a few minutes
    python scripts/bench_train.py --only '15m/bf16/*,overhead/*'

The two sides of a comparison are processes of their own that take turns (A B A B), so that a
machine which slows down slows both; the ratio is of turns that followed each other. Peers run as
they come and, where the name says +alloc, with the allocator setting that jaxdist makes for itself.
DeepSpeed needs an interpreter that has it: --deepspeed-python.
"""

import argparse
import json
import sys
from fnmatch import fnmatch
from pathlib import Path

from bench.plan import comparisons
from bench.report import HEADER, machine
from bench.ring import Ring


def main() -> int:
    """Run what was chosen; 1 where a comparison was invalid, 2 where nothing was chosen."""
    options = _options()
    every = list(comparisons(options.deepspeed_python, options.steps))
    if options.list:
        print("\n".join(comparison.name for comparison in every))
        return 0
    chosen = [comparison for comparison in every if _chosen(comparison.name, options)]
    if not chosen:
        print(f"--only {options.only} matches no comparison; --list shows them", file=sys.stderr)
        return 2
    about = machine()
    print(f"{about['cores']} cores, {about['processor']}")
    if about["load"] > 0.5:
        print(f"note: the load is {about['load']:.1f}; other work shares the cores")
    print(HEADER, flush=True)
    results = []
    with Ring() as ring:
        for comparison in chosen:
            results.append(ring.meet(comparison, options.rounds))
            print(results[-1].line(), flush=True)
    if options.json:
        record = {"machine": about, "results": [result.to_json() for result in results]}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(result.problem and result.seconds for result in results))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="the 15M shape and the meshes, fewer rounds")
    add("--only", metavar="GLOBS", help="comparisons to run, comma-separated; --list shows them")
    add("--list", action="store_true", help="print the names of the comparisons and end")
    add("--rounds", type=int, help="turns of each side (7; quick: 3)")
    add("--steps", type=int, help="steps in a turn (by shape; quick: 2)")
    add("--json", type=Path, metavar="FILE", help="write all figures")
    add("--deepspeed-python", default=sys.executable, metavar="PATH")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 7)
    options.steps = options.steps or (2 if options.quick else None)
    return options


def _chosen(name: str, options: argparse.Namespace) -> bool:
    if options.only:
        return any(fnmatch(name, glob) for glob in options.only.split(","))
    if name.startswith("tiny/"):
        return False
    return not options.quick or not (name.startswith("135m/") or name.endswith("+alloc"))


if __name__ == "__main__":
    sys.exit(main())
