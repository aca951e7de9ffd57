"""A schedule as a picture: a Gantt chart in SVG, one row a stage, time to the right.

Time is lock-step: a tick is as wide as its slowest stage makes it, so what is blank is the bubble.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from jaxdist.parallel.schedules.rings import IDLE
from jaxdist.parallel.schedules.schedule import Schedule

# Light to dark over the chunks; the hues differ in lightness too, for eyes that see few colours.
FORWARD = ("#bcd7f5", "#2c6db5")
BACKWARD = ("#fbd5a5", "#d97a1e")
WEIGHT = ("#c5e3c0", "#4a9a52")
INK, FAINT, BUBBLE = "#1f2933", "#d3dae1", "#edf0f3"
FONT = "font-family='Inter, Helvetica, Arial, sans-serif'"

_LEFT, _TOP, _RIGHT, _BOTTOM = 74, 86, 24, 44
_ROW, _GAP = 34, 6
_LEAST_WIDTH, _MOST_WIDTH = 560, 2400
_SLOT = 26  # width of a slot of average length
_SHADES = 8  # most of a kind's that the legend shows
_STEPS = (1, 2, 5, 10, 20, 50, 100, *(10**power for power in range(3, 8)))  # of the axis


@dataclass(frozen=True, kw_only=True)
class Costs:
    """How long each kind of slot takes, for all layers of an average stage.

    `num_layers` [chunks, stages] spreads that over the stretches of layers.
    """

    forward: float = 1.0
    backward: float = 1.0  # the cotangents
    weight: float = 1.0  # the weight gradients
    num_layers: np.ndarray

    @property
    def sizes(self) -> np.ndarray:
        """[chunks, stages] each stretch's part of an average stage."""
        return self.num_layers * self.num_layers.shape[1] / self.num_layers.sum()


def gantt(schedule: Schedule, costs: Costs, title: str, figures: str) -> str:
    """The SVG text of a schedule; `title` and `figures` are lines above the chart."""
    return _Chart(schedule, costs).svg(title, figures)


class _Chart:
    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        sizes = costs.num_layers / costs.num_layers.max()
        self.kinds = [("forward", FORWARD, schedule.forward, costs.forward * sizes)]
        if schedule.weight is None:
            whole = (costs.backward + costs.weight) * sizes
            self.kinds += [("backward", BACKWARD, schedule.backward, whole)]
        else:
            self.kinds += [
                ("backward", BACKWARD, schedule.backward, costs.backward * sizes),
                ("weight gradient", WEIGHT, schedule.weight, costs.weight * sizes),
            ]
        spent = np.sum([self._spent(table, cost) for _, _, table, cost in self.kinds], axis=0)
        self.starts = np.concatenate([[0.0], np.cumsum(spent.max(axis=1))])
        average = (costs.forward + costs.backward + costs.weight) / 3
        self.width = min(max(_SLOT * self.starts[-1] / average, _LEAST_WIDTH), _MOST_WIDTH)
        self.scale = self.width / self.starts[-1]
        self.height = schedule.num_stages * (_ROW + _GAP) - _GAP

    def svg(self, title: str, figures: str) -> str:
        legend, end = self._legend()
        words = _LEFT + max(9.2 * len(title), 6.7 * len(figures))
        width = max(_LEFT + self.width, words, end) + _RIGHT
        height = self.height + _TOP + _BOTTOM
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' "
            f"width='{width:.0f}' height='{height:.0f}' {FONT}>",
            f"<rect width='{width:.0f}' height='{height:.0f}' fill='white'/>",
            _text(_LEFT, 28, title, 16, weight="600"),
            _text(_LEFT, 48, figures, 12, fill="#52606d"),
            *legend,
            *self._lanes(),
            *self._boxes(),
            *self._axis(),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _spent(self, table: np.ndarray, cost: np.ndarray) -> np.ndarray:
        own = cost[self.schedule.chunk(table), np.arange(self.schedule.num_stages)]
        return np.where(table != IDLE, own, 0.0)

    def _legend(self) -> tuple[list[str], float]:
        """What each colour means, and where that ends."""
        x, chunks, parts = float(_LEFT), self.schedule.num_chunks, []
        for name, shades, _, _ in self.kinds:
            shown = min(chunks, _SHADES)
            for place in range(shown):
                parts.append(_box(x, 60, 14, 12, _shade(shades, place, shown)))
                x += 16
            words = name if chunks == 1 else f"{name}, chunk 0 to {chunks - 1}"
            parts.append(_text(x + 3, 70.5, words, 11))
            x += 22 + 6.1 * len(words)
        parts.append(_box(x, 60, 14, 12, BUBBLE, stroke=FAINT))
        parts.append(_text(x + 19, 70.5, "bubble", 11))
        return parts, x + 60

    def _lanes(self) -> Iterator[str]:
        for stage in range(self.schedule.num_stages):
            y = self._y(stage)
            yield _text(_LEFT - 12, y + _ROW / 2 + 4, f"stage {stage}", 12, anchor="end")
            yield _box(_LEFT, y, self.width, _ROW, BUBBLE)
        before = -np.inf
        for start in self.starts:
            x = _LEFT + start * self.scale
            if x - before < 3:  # lines that close would hide the bubble
                continue
            before = x
            yield (
                f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{_TOP - 4}' y2='{_TOP + self.height + 4}' "
                f"stroke='{FAINT}' stroke-width='1'/>"
            )

    def _boxes(self) -> Iterator[str]:
        digits = len(str(self.schedule.num_microbatches - 1))
        for tick, stage in np.ndindex(self.schedule.num_ticks, self.schedule.num_stages):
            x = _LEFT + self.starts[tick] * self.scale
            for name, shades, table, cost in self.kinds:
                entry = table[tick, stage]
                if entry == IDLE:
                    continue
                microbatch, chunk = divmod(int(entry), self.schedule.num_chunks)
                width = cost[chunk, stage] * self.scale
                fill = _shade(shades, chunk, self.schedule.num_chunks)
                told = (
                    f"{name} of microbatch {microbatch}, chunk {chunk}: tick {tick}, stage {stage}"
                )
                yield f"<g><title>{told}</title>"
                gap = min(1, width / 4)
                yield _box(x + gap / 2, self._y(stage), width - gap, _ROW, fill)
                size = min(12.0, (width - 3) / (0.6 * digits))
                if size >= 5.5:
                    ink = "white" if _is_dark(fill) else INK
                    place = x + width / 2, self._y(stage) + _ROW / 2 + size * 0.36
                    yield _text(*place, str(microbatch), size, fill=ink, anchor="middle")
                yield "</g>"
                x += width

    def _axis(self) -> Iterator[str]:
        y = _TOP + self.height + 20
        widths = np.diff(self.starts) * self.scale
        step = next(n for n in _STEPS if n * widths.mean() >= 20)
        end = 0.0  # of the last label
        for tick in range(0, self.schedule.num_ticks, step):
            x = _LEFT + self.starts[tick] * self.scale + widths[tick] / 2
            half = 3.2 * len(str(tick))
            if x - half > end:
                yield _text(x, y, str(tick), 10, fill="#7b8794", anchor="middle")
                end = x + half + 2
        yield _text(_LEFT - 12, y, "tick", 10, fill="#7b8794", anchor="end")

    def _y(self, stage: int) -> int:
        return _TOP + stage * (_ROW + _GAP)


def _shade(shades: tuple[str, str], chunk: int, num_chunks: int) -> str:
    """A colour between the two, the middle of the scale for a chunk alone."""
    part = 0.35 if num_chunks == 1 else chunk / (num_chunks - 1)
    light, dark = (_rgb(shade) for shade in shades)
    mixed = (round(a + (b - a) * part) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


def _is_dark(colour: str) -> bool:
    red, green, blue = _rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 140


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none") -> str:
    return (
        f"<rect x='{x:.2f}' y='{y:.1f}' width='{width:.2f}' height='{height}' rx='2.5' "
        f"fill='{fill}' stroke='{stroke}'/>"
    )


def _text(
    x: float, y: float, words: str, size: float, *, fill: str = INK, anchor: str = "start",
    weight: str = "400",
) -> str:  # fmt: skip
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:.1f}' font-weight='{weight}' "
        f"fill='{fill}' text-anchor='{anchor}'>{escape(words)}</text>"
    )
