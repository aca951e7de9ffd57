"""`jaxdist plan --schedule`: a schedule's figures, its picture and its table, without a device."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxdist.config import UsageError
from jaxdist.config.compute import parse_layout
from jaxdist.parallel.schedules.csv_file import write_table
from jaxdist.parallel.schedules.schedule import Schedule
from jaxdist.planner.gantt import Costs, gantt


def figures(schedule: Schedule, costs: Costs) -> dict[str, Any]:
    """What the simulator says of a schedule.

    `bubble` is the share of the time in which stages idle, `peak_in_flight` the most microbatches
    (of a chunk) whose activations a stage holds, `ring_slots` the slots kept for them, `time` and
    `ideal_time` are in the unit of the costs.
    """
    spent = (costs.forward, costs.backward, costs.weight, costs.sizes)
    bubble, time = schedule.bubble(*spent), schedule.time(*spent)
    rings = {
        "tap_slots": schedule.taps,
        "waiting_slots": schedule.waiting,
        "down_inbox_slots": schedule.down_inbox,
        "up_inbox_slots": schedule.up_inbox,
    }
    return {
        "schedule": schedule.name,
        "stages": schedule.num_stages,
        "microbatches": schedule.num_microbatches,
        "chunks": schedule.num_chunks,
        "ticks": schedule.num_ticks,
        "time": time,
        "ideal_time": time * (1 - bubble),
        "bubble": bubble,
        "peak_in_flight": schedule.peak_in_flight,
        "ring_slots": schedule.residuals.size,
        **{name: ring.size if ring else 0 for name, ring in rings.items()},
    }


def parse_costs(words: str, layout: str | None, schedule: Schedule) -> Costs:
    """`F,B,W`, and a layout of layers over the stretches of the model."""
    try:
        forward, backward, weight = (float(word) for word in words.split(","))
    except ValueError:
        raise UsageError(f"--costs {words!r} must be three numbers, as in 1,1,1") from None
    if not all(1e-6 <= cost <= 1e6 for cost in (forward, backward, weight)):
        raise UsageError(f"--costs {words!r}: each must be a number from 1e-6 to 1e6")
    parts = schedule.num_stages * schedule.num_chunks
    counts = (1,) * parts if layout is None else parse_layout("--layout", layout)
    if len(counts) != parts:
        raise UsageError(
            f"--layout {layout!r} has {len(counts)} counts; {schedule.num_stages} stages x "
            f"{schedule.num_chunks} chunks need {parts}"
        )
    sizes = np.array(counts, float).reshape(schedule.num_chunks, schedule.num_stages)
    return Costs(forward=forward, backward=backward, weight=weight, num_layers=sizes)


def report(
    schedule: Schedule,
    costs: Costs,
    *,
    picture: str | None = None,
    table: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the figures; write the picture and the table where they are asked for."""
    found = figures(schedule, costs)
    for option, path, suffix in (("picture", picture, ".svg"), ("table", table, ".csv")):
        if path is not None and Path(path).suffix != suffix:
            raise UsageError(f"--{option} {path} must end in {suffix}")
    if picture is not None:
        drawn = gantt(schedule, costs, _title(found), _summary(found))
        Path(picture).write_text(drawn, encoding="utf-8")
    if table is not None:
        write_table(schedule, table)
    if as_json:
        print(json.dumps(found))
        return
    # Paths may hold brackets, which are no markup.
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{_title(found)}\n")
    lines = Table(show_header=False, box=None, pad_edge=False)
    lines.add_row("bubble", f"{found['bubble']:.1%}", "of the time a stage idles")
    lines.add_row("time", f"{found['time']:g}", f"ideal {found['ideal_time']:g}")
    lines.add_row("ticks", str(found["ticks"]), "ring permutes each way, at most")
    unit = "microbatches" if schedule.num_chunks == 1 else "microbatches of a chunk"
    lines.add_row("peak in flight", str(found["peak_in_flight"]), f"{unit} that a stage holds")
    lines.add_row("ring slots", str(found["ring_slots"]), "for their activations")
    for name, words in (
        ("tap_slots", "for what weight gradients wait for"),
        ("waiting_slots", "for scored cotangents"),
        ("down_inbox_slots", "for activations that arrive early"),
        ("up_inbox_slots", "for cotangents that arrive early"),
    ):
        if found[name]:
            lines.add_row(name.replace("_", " "), str(found[name]), words)
    console.print(lines)
    for written, what in ((picture, "the picture"), (table, "the table")):
        if written is not None:
            console.print(f"\n{what} is {written}")


def _title(found: dict[str, Any]) -> str:
    parts = [f"{found['stages']} stages", f"{found['microbatches']} microbatches"]
    if found["chunks"] > 1:
        parts.append(f"{found['chunks']} chunks a stage")
    return f"{found['schedule']}: {', '.join(parts)}"


def _summary(found: dict[str, Any]) -> str:
    return " · ".join(
        (
            f"bubble {found['bubble']:.1%}",
            f"time {found['time']:g}, ideal {found['ideal_time']:g}",
            f"peak in flight {found['peak_in_flight']}",
            f"ring slots {found['ring_slots']}",
        )
    )
