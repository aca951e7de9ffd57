"""`python -m jaxdist.plan`: what a run will take, told before it runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxdist.config import UsageError, limits, one_line_errors

MOST = 4096  # stages, microbatches or chunks of a schedule that is drawn


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and report; returns the exit code."""
    with one_line_errors():
        options = _parser().parse_args(_dashed(sys.argv[1:] if argv is None else argv))
        if options.schedule is None:
            raise UsageError("say what to plan: --schedule NAME; --help lists the options")
        plan_schedule(options)
    return 0


def plan_schedule(options: argparse.Namespace) -> None:
    """Report a schedule; loads no JAX."""
    from jaxdist.parallel.schedules import open_schedule
    from jaxdist.planner.schedule_report import parse_costs, report

    for option in ("pp", "microbatches", "chunks"):
        value = getattr(options, option)
        if value is not None:
            limits.whole(f"--{option}", value, 1, MOST)
    schedule = open_schedule(
        options.schedule, options.pp, options.microbatches, options.chunks, source="--schedule"
    )
    costs = parse_costs(options.costs, options.layout, schedule)
    report(
        schedule,
        costs,
        picture=options.picture,
        table=options.table,
        as_json=options.json,
    )


def _parser() -> "_Parser":
    parser = _Parser(prog="jaxdist plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="Print the figures as one JSON object.")
    group = parser.add_argument_group("a pipeline schedule")
    group.add_argument(
        "--schedule", metavar="NAME",
        help="gpipe, 1f1b, interleaved, zb, or the .csv file of a schedule of one's own.",
    )  # fmt: skip
    group.add_argument("--pp", type=int, help="Stages [4, or those of the file].")
    group.add_argument("--microbatches", type=int, help="[8, or those of the file]")
    group.add_argument(
        "--chunks", type=int, help="Stretches of layers a stage [2 for interleaved, else 1]."
    )
    group.add_argument(
        "--costs", default="1,1,1", metavar="F,B,W",
        help="Time of a stage's forward, of its cotangents and weight gradients [1,1,1].",
    )  # fmt: skip
    group.add_argument(
        "--layout", metavar="N,N,...", help="Layers of each stretch, where they differ."
    )
    group.add_argument("--picture", metavar="FILE.svg", help="Draw the schedule.")
    group.add_argument("--table", metavar="FILE.csv", help="Write it as a file to change.")
    return parser


def _dashed(argv: Sequence[str]) -> list[str]:
    """Options spelled with - for each _."""
    return [word.replace("_", "-") if word.startswith("--") else word for word in argv]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


if __name__ == "__main__":
    sys.exit(main())
