"""The figures of a comparison: medians, and the ratio of its paired rounds."""

import os
import statistics
from dataclasses import asdict, dataclass, field

from bench.plan import Comparison

COLUMNS = "{:<24}  {:<15} {:>9}  {:<20} {:>9}  {:>20}  {:>8}  {}"
HEADER = COLUMNS.format(
    *("comparison", "ours", "", "against", "", "ratio (min .. max)", "target", "")
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of a comparison."""

    comparison: Comparison
    seconds: list[tuple[float, float]] = field(default_factory=list)  # subject, reference a round
    problem: str = ""  # why the figures do not count, if they do not

    @property
    def ratios(self) -> list[float]:
        """The ratio of each round, of turns that followed each other."""
        by_time = self.comparison.by == "time"
        return [ours / theirs if by_time else theirs / ours for ours, theirs in self.seconds]

    @property
    def met(self) -> bool | None:
        """Whether the median ratio reaches the target."""
        if self.problem or not self.seconds:
            return None
        return self.comparison.met(statistics.median(self.ratios))

    def line(self) -> str:
        """One row of the table; medians, and the range of the ratio."""
        one = self.comparison
        if not self.seconds:
            return f"{one.name:<24}  not run: {self.problem}"
        figures = (self._figure(list(side)) for side in zip(*self.seconds, strict=True))
        middle, low, high = statistics.median(self.ratios), min(self.ratios), max(self.ratios)
        ratio = f"{middle:.2f} ({low:.2f} .. {high:.2f})"
        sign = "<=" if one.by == "time" else ">="
        target = "" if one.target is None else f"{sign} {one.target:g}"
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        ours, theirs = figures
        row = (one.name, one.subject.title, ours, one.reference.title, theirs)
        note = f"INVALID: {self.problem}" if self.problem else verdict
        return COLUMNS.format(*row, ratio, target, note).rstrip()

    def to_json(self) -> dict:
        """All of it, with tokens a second by round."""
        one = self.comparison
        tokens = one.subject.shape.tokens * one.steps
        return {
            "name": one.name,
            "subject": asdict(one.subject),
            "reference": asdict(one.reference),
            "by": one.by,
            "seconds": self.seconds,
            "tokens_per_second": [[tokens / s for s in pair] for pair in self.seconds]
            if one.by == "speed"
            else None,
            "ratios": self.ratios,
            "ratio": statistics.median(self.ratios) if self.seconds else None,
            "target": one.target,
            "met": self.met,
            "problem": self.problem,
        }

    def _figure(self, seconds: list[float]) -> str:
        one, middle = self.comparison, statistics.median(seconds)
        if one.by == "time":
            return f"{middle / one.steps:.2f} s"
        return f"{one.subject.shape.tokens * one.steps / middle:,.0f} t/s"


def machine() -> dict:
    """Cores, processor, and how busy they are now: a busy machine's figures mean little."""
    model = "unknown"
    try:
        with open("/proc/cpuinfo") as lines:
            model = next(line for line in lines if line.startswith("model name")).split(": ")[1]
    except (OSError, StopIteration):
        pass
    return {
        "processor": model.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }
