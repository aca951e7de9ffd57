"""The figures of races: medians, and the ratio of paired turns with its range."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from bench.serving.plan import Entry, Race
from bench.serving.spec import Reply

COLUMNS = "{:<11} {:<17} {:>9}  {:<15} {:>9}  {:>20}  {:>7}  {}"
HEADER = COLUMNS.format("race", "ours", "", "against", "", "ratio (min .. max)", "target", "")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Ours against one other."""

    race: Race
    other: Entry
    pairs: Sequence[tuple[Reply, Reply]]  # ours, theirs: turns of one round
    problem: str = ""  # why the figures do not count, if they do not

    @property
    def ratios(self) -> list[float]:
        """Our tokens a second over theirs, in each round."""
        ours, theirs = self.race.ours.task.tokens, self.other.task.tokens
        return [b.seconds * ours / (a.seconds * theirs) for a, b in self.pairs]

    @property
    def met(self) -> bool | None:
        """Whether the median ratio reaches the target; None where that cannot be said."""
        if self.problem or not self.pairs or self.other.target is None:
            return None
        return statistics.median(self.ratios) >= self.other.target

    def line(self) -> str:
        """One row of the table."""
        race, other = self.race, self.other
        if not self.pairs:
            return f"{race.name:<11} against {other.title}: not run: {self.problem}"
        ours = self._figure(race.ours, [a.seconds for a, _ in self.pairs])
        theirs = self._figure(other, [b.seconds for _, b in self.pairs])
        low, middle, high = min(self.ratios), statistics.median(self.ratios), max(self.ratios)
        verdict = {True: "met", False: "MISSED", None: ""}[self.met]
        return COLUMNS.format(
            *(race.name, race.ours.title, ours, other.title, theirs),
            f"{middle:.2f} ({low:.2f} .. {high:.2f})",
            "" if other.target is None else f">= {other.target:g}",
            f"INVALID: {self.problem}" if self.problem else verdict,
        ).rstrip()

    def to_json(self) -> dict:
        """All of it but the tokens."""
        return {
            "race": self.race.name,
            "ours": asdict(self.race.ours),
            "other": asdict(self.other),
            "seconds": [(a.seconds, b.seconds) for a, b in self.pairs],
            "counters": [(dict(a.counters), dict(b.counters)) for a, b in self.pairs],
            "ratios": self.ratios,
            "ratio": statistics.median(self.ratios) if self.pairs else None,
            "target": self.other.target,
            "met": self.met,
            "problem": self.problem,
        }

    def _figure(self, entry: Entry, seconds: list[float]) -> str:
        middle = statistics.median(seconds)
        if self.race.unit == "ms":
            return f"{1e3 * middle:,.1f} ms"
        return f"{entry.task.tokens / middle:,.0f} t/s"


def host_share(outcome: Outcome) -> float | None:
    """Median share of our turns that the engine's host side took; None where it is not known."""
    known = [a for a, _ in outcome.pairs if "host_seconds" in a.counters]
    if not known:
        return None
    return statistics.median(reply.counters["host_seconds"] / reply.seconds for reply in known)
