"""`loss.png`: training and validation loss of a run over its steps."""

from __future__ import annotations

import io
from pathlib import Path

from jaxdist.training.metrics import FILE, read_rows

PLOT = "loss.png"
Curve = tuple[list[float], list[float]]  # steps, losses


def plot_loss(run_dir: str | Path) -> None:
    """Draws `loss.png` from `metrics.jsonl`; draws nothing where no loss is recorded."""
    from matplotlib.figure import Figure  # half a second of import at the end of a run, not before

    run_dir = Path(run_dir)
    rows = list(read_rows(run_dir / FILE)) if (run_dir / FILE).exists() else []
    steps, losses = _curve(rows, "loss")
    if not steps:
        return
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats per token)", title=run_dir.name)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, _smoothed(losses), color="tab:blue", linewidth=1.8, label="training")
    steps, losses = _curve(rows, "val_loss")
    if steps:
        label = f"validation, last {losses[-1]:.3f}"
        axes.plot(steps, losses, color="tab:orange", marker="o", markersize=4, label=label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    (run_dir / PLOT).write_bytes(drawn.getvalue())


def _curve(rows: list[dict], name: str) -> Curve:
    """Steps and values of the rows where `name` is a finite number."""
    kept = [row for row in rows if row.get(name) is not None]
    return [row["step"] for row in kept], [row[name] for row in kept]


def _smoothed(values: list[float]) -> list[float]:
    """Average over a window that decays within a fiftieth of the run."""
    decay = 1 - 1 / max(len(values) / 50, 1)
    smooth, average, weight = [], 0.0, 0.0
    for value in values:
        average, weight = decay * average + (1 - decay) * value, decay * weight + (1 - decay)
        smooth.append(average / weight)
    return smooth
