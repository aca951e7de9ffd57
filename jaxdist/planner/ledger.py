"""What a compiled step sends, beside the least that it has to: one row a part of the program.

`traffic.py` says what is needed, `parallel/audit.py` what the program does; the named scopes that
the model and the pipeline carry join the two. Bytes are those that one device sends in a step.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from jaxdist.parallel.audit import Collective
from jaxdist.planner.flow import Flow
from jaxdist.planner.readable import readable

OTHER = "other"  # what no flow speaks of: metrics, norms, the gradients of gains


@dataclass(frozen=True, kw_only=True)
class Row:
    """One part's traffic over some mesh axes in one step, bytes of one device."""

    axes: tuple[str, ...]
    part: str
    kinds: tuple[str, ...]
    count: int | None  # executions, None where a loop's trip count is unknown
    payload: int  # bytes of the arrays that the collectives are about
    sent: float  # bytes that a device sends
    in_bubbles: float  # of these, by slots of the schedule that are empty
    least: float | None  # what a device has to send; None for `OTHER`
    formula: str

    @property
    def ratio(self) -> float | None:
        """What is sent for microbatches over the least; 1.0 is perfect."""
        return (self.sent - self.in_bubbles) / self.least if self.least else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "axes": list(self.axes),
            "part": self.part,
            "kinds": list(self.kinds),
            "count": self.count,
            "payload_bytes": self.payload,
            "sent_bytes": round(self.sent),
            "bubble_bytes": round(self.in_bubbles),
            "least_bytes": None if self.least is None else round(self.least),
            "ratio": self.ratio,
            "formula": self.formula,
        }


def ledger(flows: Sequence[Flow], traffic: Iterable[Collective]) -> list[Row]:
    """Rows in the order of `flows`, then what none of them speaks of, axis by axis."""
    expected = {(flow.axes, flow.part): flow for flow in flows}
    parts = {flow.part for flow in flows}
    found: dict[tuple[tuple[str, ...], str], list[Collective]] = {key: [] for key in expected}
    for one in traffic:
        key = one.axes, part_of(one.scope, parts)
        found.setdefault(key if key in expected else (one.axes, OTHER), []).append(one)
    return [_row(key, group, expected.get(key)) for key, group in found.items()]


def ratios(rows: Iterable[Row]) -> dict[tuple[str, ...], float]:
    """For each combination of axes, what is sent for microbatches over the least.

    A compiler may combine collectives of several parts, of which one then gives its name; over the
    axes as a whole they add up.
    """
    sent: dict[tuple[str, ...], float] = {}
    least: dict[tuple[str, ...], float] = {}
    for row in rows:
        sent[row.axes] = sent.get(row.axes, 0.0) + row.sent - row.in_bubbles
        least[row.axes] = least.get(row.axes, 0.0) + (row.least or 0.0)
    return {axes: sent[axes] / least[axes] for axes in sent if least[axes]}


def part_of(scope: str, parts: set[str]) -> str:
    """The innermost of `parts` in a name stack such as jit(step)/transpose(jvp(mlp))/psum."""
    words = [word for word in re.findall(r"\w+", scope) if word in parts]
    return words[-1] if words else OTHER


def table(rows: Iterable[Row]) -> Table:
    """For the terminal."""
    lines = Table(box=None, pad_edge=False)
    for column in ("mesh axis", "part", "collectives"):
        lines.add_column(column, no_wrap=True)
    for column in ("count", "sent", "in bubbles", "least", "ratio"):
        lines.add_column(column, justify="right", no_wrap=True)
    lines.add_column("least by theory, x (n-1)/n", no_wrap=True)
    for row in rows:
        lines.add_row(
            " x ".join(row.axes),
            row.part,
            ", ".join(row.kinds),
            "unknown" if row.count is None else f"{row.count:,}",
            readable(row.sent),
            readable(row.in_bubbles) if row.in_bubbles else "",
            "" if row.least is None else readable(row.least),
            "" if row.ratio is None else f"{row.ratio:.2f}",
            row.formula,
        )
    return lines


def _row(key: tuple[tuple[str, ...], str], group: list[Collective], flow: Flow | None) -> Row:
    axes, part = key
    known = [one for one in group if one.count is not None]
    return Row(
        axes=axes,
        part=part,
        kinds=tuple(sorted({one.kind for one in group})),
        count=sum(one.count or 0 for one in known) if len(known) == len(group) else None,
        payload=sum((one.count or 0) * one.bytes for one in known),
        sent=sum((one.count or 0) * one.sent_bytes for one in known),
        in_bubbles=0.0 if flow is None else flow.in_bubbles,
        least=None if flow is None else flow.least,
        formula="" if flow is None else flow.formula,
    )
