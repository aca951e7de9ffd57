"""A user's own schedule, from a CSV file.

One row a tick, one column a stage; a first row of titles, empty lines, and lines that begin with #
are passed over. A cell holds what the stage does in that tick, in any order: `F3` forwards
microbatch 3, `B1` takes microbatch 1 back, `W0` makes microbatch 0's weight gradients; `F3.1` is
microbatch 3 in chunk 1, the second stretch of layers of that stage. An empty cell, or `-`, idles.
What a stage sends arrives in the next tick, and waits there for its own. Without any W a backward
makes the weight gradients along. 1F1B for two stages and two microbatches:

    stage 0, stage 1
    F0,
    F1,      F0 B0
    B0,      F1 B1
    B1,
"""

import csv
import re
from pathlib import Path

import numpy as np

from jaxdist.config import UsageError
from jaxdist.parallel.schedules.rings import IDLE
from jaxdist.parallel.schedules.schedule import Schedule

_WORD = re.compile(r"([FBW])(\d{1,5})(?:\.(\d{1,3}))?")
_HOW = "a cell holds words such as F3, B1 or W0.1 (microbatch 0, chunk 1), or nothing"
_MOST_CELLS = 1 << 20


def read_table(path: str | Path) -> Schedule:
    """The schedule in a CSV file. UsageError, naming tick and stage, where it cannot run."""
    rows = _rows(Path(path))
    num_stages = max(map(len, rows))
    words: dict[tuple[str, int, int], tuple[int, int]] = {}
    for tick, row in enumerate(rows):
        for stage, cell in enumerate(row):
            for word in cell.replace("-", " ").split():
                kind, microbatch, chunk = _parsed(word, path, tick, stage)
                if (kind, tick, stage) in words:
                    raise UsageError(f"{path}: tick {tick}, stage {stage}: two {kind} in one cell")
                words[kind, tick, stage] = microbatch, chunk
    num_chunks = 1 + max(chunk for _, chunk in words.values())
    num_microbatches = 1 + max(microbatch for microbatch, _ in words.values())
    if num_microbatches * num_chunks > len(rows):
        raise UsageError(
            f"{path}: microbatch {num_microbatches - 1} and chunk {num_chunks - 1} make "
            f"{num_microbatches} x {num_chunks} forwards a stage, more than its {len(rows)} ticks"
        )
    tables = {k: np.full((len(rows), num_stages), IDLE, np.int32) for k in "FBW"}
    for (kind, tick, stage), (microbatch, chunk) in words.items():
        tables[kind][tick, stage] = microbatch * num_chunks + chunk
    weight = tables["W"] if (tables["W"] != IDLE).any() else None
    if (tables["B"] == IDLE).all():
        raise UsageError(f"{path}: there is no backward (B) in it; {_HOW}")
    try:
        return Schedule(str(path), tables["F"], tables["B"], weight, num_chunks)
    except ValueError as error:
        raise UsageError(str(error)) from None


def write_table(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule as a file that `read_table` reads, to be changed by hand."""
    titles = ["", *(f"stage {stage}" for stage in range(schedule.num_stages))]
    lines = [titles[1:], *_cells(schedule)]
    widths = [max(len(line[stage]) for line in lines) for stage in range(schedule.num_stages)]
    padded = (", ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    Path(path).write_text("\n".join(padded) + "\n")


def _cells(schedule: Schedule) -> list[list[str]]:
    tables = {"F": schedule.forward, "B": schedule.backward, "W": schedule.weight}

    def word(kind: str, entry: int) -> str:
        microbatch, chunk = divmod(int(entry), schedule.num_chunks)
        return f"{kind}{microbatch}" + (f".{chunk}" if schedule.num_chunks > 1 else "")

    return [
        [
            " ".join(
                word(kind, table[tick, stage])
                for kind, table in tables.items()
                if table is not None and table[tick, stage] != IDLE
            )
            for stage in range(schedule.num_stages)
        ]
        for tick in range(schedule.num_ticks)
    ]


def _rows(path: Path) -> list[list[str]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"schedule {path} cannot be read: {reason}") from None
    lines = [line for line in text.splitlines() if line.strip() and line.lstrip()[0] != "#"]
    try:
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines)]
    except csv.Error as error:
        raise UsageError(f"schedule {path} is no CSV: {error}") from None
    while rows and not any(rows[-1]):
        rows.pop()
    if rows and any(rows[0]) and not any(_looks_like_work(cell) for cell in rows[0]):
        rows.pop(0)
    if not any(cell.strip("- ") for row in rows for cell in row):
        raise UsageError(f"schedule {path} is empty; {_HOW}")
    if len(rows) * max(map(len, rows)) > _MOST_CELLS:
        raise UsageError(f"schedule {path} has more than {_MOST_CELLS:,} cells")
    return rows


def _looks_like_work(cell: str) -> bool:
    return any(word == "-" or re.match(r"[FBW]\d", word) for word in cell.split())


def _parsed(word: str, path: str | Path, tick: int, stage: int) -> tuple[str, int, int]:
    found = _WORD.fullmatch(word)
    if found is None:
        raise UsageError(f"{path}: tick {tick}, stage {stage}: {word!r} is not known; {_HOW}")
    kind, microbatch, chunk = found.groups()
    return kind, int(microbatch), int(chunk or 0)
