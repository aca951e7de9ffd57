"""What requests tell of a server: throughput, latencies at percentiles, goodput.

The words mean what `vllm bench serve` means by them. TTFT: from sending a request to the first
event with text. ITL: between successive events. TPOT: (last event - first event) / (tokens - 1).
E2EL: from sending to the last event. Goodput: requests a second that kept all the limits given.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 99)
METRICS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL"}  # in tables
_ROW = "{:<6} {:>10} {:>10} {:>10} {:>10}"


@dataclass(kw_only=True)
class Answer:
    """One request's life.

    Attributes:
        sent: When, in seconds of some clock.
        events: When events with text came, on the same clock.
        num_prompt_tokens, num_tokens: By the server's count.
        error: Why it does not count; empty where it went well.
    """

    sent: float
    events: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    error: str = ""

    @property
    def seconds(self) -> dict[str, float]:
        """Its TTFT, TPOT (where it has two tokens) and E2EL."""
        first, last = self.events[0], self.events[-1]
        times = {"ttft": first - self.sent, "e2el": last - self.sent}
        if self.num_tokens > 1:
            times["tpot"] = (last - first) / (self.num_tokens - 1)
        return times


def summary(answers: Sequence[Answer], limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Figures of a run; latencies in milliseconds, None where there is nothing to count.

    limits: Greatest ttft, tpot, e2el in milliseconds of a request that is good.
    """
    done = [answer for answer in answers if not answer.error]
    figures: dict[str, Any] = {"requests": len(answers), "failed": len(answers) - len(done)}
    figures["errors"] = sorted({answer.error for answer in answers if answer.error})[:5]
    if not done:
        return figures
    duration = max(a.events[-1] for a in done) - min(a.sent for a in done)
    tokens = sum(answer.num_tokens for answer in done)
    prompt_tokens = sum(answer.num_prompt_tokens for answer in done)
    figures |= {
        "seconds": duration,
        "prompt_tokens": prompt_tokens,
        "generated_tokens": tokens,
        "requests_per_second": len(done) / duration,
        "generated_tokens_per_second": tokens / duration,
        "tokens_per_second": (tokens + prompt_tokens) / duration,
    }
    each = [answer.seconds for answer in done]
    values = {name: [s[name] for s in each if name in s] for name in ("ttft", "tpot", "e2el")}
    values["itl"] = [gap for answer in done for gap in np.diff(answer.events)]
    for name in METRICS:
        figures[f"{name}_ms"] = distribution([1e3 * value for value in values[name]])
    if limits:
        good = sum(_is_good(seconds, limits) for seconds in each)
        figures |= {"goodput": good / duration, "good": good, "limits_ms": dict(limits)}
    return figures


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles, between ranks by straight lines; None of nothing."""
    if not values:
        return None
    points = np.percentile(values, PERCENTILES)
    named = {f"p{p}": float(point) for p, point in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(np.mean(values)), **named}


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` as numbers of milliseconds. ValueError says what is wrong."""
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in ("ttft", "tpot", "e2el"):
            raise ValueError(f"{word}: a limit is ttft:MS, tpot:MS or e2el:MS")
        try:
            limits[name] = float(value)
        except ValueError:
            raise ValueError(f"{word}: {value!r} is no number of milliseconds") from None
        if not 0 < limits[name] < float("inf"):
            raise ValueError(f"{word}: a limit is more than 0 ms, and finite")
    return limits


def table(figures: Mapping[str, Any]) -> str:
    """For a reader."""
    lines = [f"{figures['requests']} requests, {figures['failed']} failed"]
    lines += [f"  {error}" for error in figures["errors"]]
    if "seconds" not in figures:
        return "\n".join(lines)
    lines[0] += (
        f", {figures['seconds']:.2f} s: {figures['requests_per_second']:.2f} requests/s, "
        f"{figures['generated_tokens_per_second']:,.1f} generated tokens/s, "
        f"{figures['tokens_per_second']:,.1f} with prompts"
    )
    if "goodput" in figures:
        limits = ", ".join(f"{name} {ms:g} ms" for name, ms in figures["limits_ms"].items())
        lines.append(
            f"goodput {figures['goodput']:.2f} requests/s: {figures['good']} within {limits}"
        )
    lines.append(_ROW.format("ms", "mean", *(f"p{p}" for p in PERCENTILES)))
    for name, title in METRICS.items():
        found = figures[f"{name}_ms"]
        cells = ["-"] * 4 if found is None else [f"{value:,.1f}" for value in found.values()]
        lines.append(_ROW.format(title, *cells))
    return "\n".join(lines)


def _is_good(seconds: Mapping[str, float], limits: Mapping[str, float]) -> bool:
    """A request of one token has no TPOT, and keeps its limit."""
    return all(1e3 * seconds.get(name, 0.0) <= most for name, most in limits.items())
