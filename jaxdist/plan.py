"""`python -m jaxdist.plan`: what a run will take, told before it runs."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from jaxdist import platform
from jaxdist.config import UsageError, limits, one_line_errors

_STEP = ("--audit", "--compile-for")  # what needs a run's step
MOST = 4096  # stages, microbatches or chunks of a schedule that is drawn
MOST_CELLS = 2**18  # their product, which is simulated within a minute


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and report; returns the exit code."""
    with one_line_errors():
        words = sys.argv[1:] if argv is None else argv
        if any(word.split("=")[0].replace("_", "-") in _STEP for word in words):
            plan_step(words)
            return 0
        options = _parser().parse_args(_dashed(words))
        if options.schedule is None:
            raise UsageError(
                "say what to plan: --schedule NAME, or --audit or --compile-for DEVICE:SHAPE of a "
                "run; --help lists the options"
            )
        plan_schedule(options)
    return 0


def plan_step(argv: Sequence[str]) -> None:
    """Compile a run's step, here or for a machine that is not here, and report on it."""
    from jaxdist.config.command_line import parse
    from jaxdist.planner.compiled import require_compiler
    from jaxdist.planner.hardware import Target
    from jaxdist.train import read_origin

    own = _Parser(add_help=False, allow_abbrev=False)
    own.add_argument("--json", action="store_true")
    _add_step(own)
    words = [_dashed_name(word) for word in argv]
    options, rest = own.parse_known_args(words)
    config = parse(rest, "jaxdist plan", read_origin)
    target = None if options.compile_for is None else Target.parse(options.compile_for)
    # The platform is chosen before JAX is loaded.
    if target is not None:
        require_compiler(target.hardware)
        platform.without_accelerators()
    elif config.simulate:
        platform.simulate_devices(config.mesh_shape.size)
    from jaxdist.training import planned

    found = planned.compile_here(config) if target is None else planned.compile_for(config, target)
    planned.report(found, as_json=options.json)


def plan_schedule(options: argparse.Namespace) -> None:
    """Report a schedule; loads no JAX."""
    from jaxdist.parallel.schedules.named import open_schedule
    from jaxdist.planner.schedule_report import parse_costs, report

    for option in ("pp", "microbatches", "chunks"):
        value = getattr(options, option)
        if value is not None:
            limits.whole(f"--{option}", value, 1, MOST)
    cells = (options.pp or 1) * (options.microbatches or 1) * (options.chunks or 1)
    if cells > MOST_CELLS:
        raise UsageError(
            f"--pp times --microbatches times --chunks is {cells:,}: at most {MOST_CELLS:,} can be "
            "simulated; lower one of them"
        )
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
    parser = _Parser(
        prog="jaxdist plan",
        description="Tell what a run will take, before it runs.",
        allow_abbrev=False,
    )
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
    _add_step(parser)
    return parser


def _add_step(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a run's step, with all of `jaxdist train`'s options")
    group.add_argument(
        "--audit", action="store_true",
        help="Compile it and list what it sends over each mesh axis, beside the least it has to.",
    )  # fmt: skip
    group.add_argument(
        "--compile-for", metavar="DEVICE:SHAPE",
        help="The same, and its memory, on a machine that is not here: h100:8x8 is 8 hosts of 8.",
    )  # fmt: skip


def _dashed_name(word: str) -> str:
    name, equals, value = word.partition("=")
    dashed = name.replace("_", "-")
    return dashed + equals + value if dashed in _STEP else word


def _dashed(argv: Sequence[str]) -> list[str]:
    """Options spelled with - for each _ of their names."""

    def one(word: str) -> str:
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value if name.startswith("--") else word

    return [one(word) for word in argv]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help lists the options")


if __name__ == "__main__":
    sys.exit(main())
