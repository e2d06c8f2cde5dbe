"""Draws curves from the stored runs alone: through training, and over the minutes of training.

python -m benchmarks.papers.curves    # writes the SVG of each table whose runs are stored
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.papers.pages import CURVES, mean_of
from benchmarks.papers.plans import SEEDS
from benchmarks.papers.runs import CLASSIFICATION, STORED
from benchmarks.papers.store import stored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Records = Mapping[str, Mapping[str, Any]]

# The panels of the curves through training: what is drawn, and its name in a training's log.
PANELS = {
    "mean cosine of positives": "positive_cosine",
    "mean cosine of mixed negatives": "mixed_cosine",
    "mean cosine of other sentences": "negative_cosine",
    "alignment": "alignment",
    "uniformity": "uniformity",
}
LOSSES = {"simcse": "C0", "mixcse-0.2": "C1"}
MODELS = {"quickthoughts": "C0", "skip-thoughts": "C1"}


def views(records: Records) -> Figure:
    """What SimCSE and MixCSE report through training: a panel for each figure, a line for each seed."""
    figure = _figure(3, 2)
    *drawn, rest = figure.axes
    for axes, (title, name) in zip(drawn, PANELS.items(), strict=True):
        for loss, colour in LOSSES.items():
            for seed in SEEDS:
                log = records[f"{loss}-seed{seed}"]["log"]
                steps, values = series(log, name)
                label = loss if seed == SEEDS[0] else None
                axes.plot(steps, values, color=colour, linewidth=0.9, label=label)
        axes.set_xlabel("step")
        axes.set_title(title, fontsize=9)
    rest.legend(*drawn[0].get_legend_handles_labels(), loc="center")
    rest.axis("off")
    return figure


def hours(records: Records) -> Figure:
    """Mean accuracy of the classification tasks over the CPU minutes of training, a point for each stage."""
    figure = _figure(1, 1)
    axes: Axes = figure.axes[0]
    for model, colour in MODELS.items():
        stages = sorted(
            (record["cpu_minutes"], mean_of(record, CLASSIFICATION))
            for name, record in records.items()
            if name.startswith(f"{model} at ")
        )
        axes.plot(*zip(*stages, strict=True), "o-", color=colour, label=model)
    axes.set(xlabel="CPU minutes of training", ylabel="mean accuracy, %")
    axes.legend()
    return figure


def series(log: list[dict[str, float]], name: str) -> tuple[list[float], list[float]]:
    """The steps at which a figure was reported, and its values."""
    lines = [line for line in log if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


DRAWN = {"hours": hours, "views-minilm": views, "views-masked-words": views}


def _figure(rows: int, columns: int) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "fastqt"
    # Of a width at which a phone's screen leaves the words large enough to be read.
    figure = Figure(figsize=(4.6 if columns == 1 else 5.8, 2.2 * rows + 1), layout="constrained")
    for number in range(rows * columns):
        figure.add_subplot(rows, columns, number + 1).grid(alpha=0.3)
    return figure


def draw(folder: Path = STORED) -> list[Path]:
    """Draws the curves of all tables whose runs are stored; the files that were written."""
    written = []
    for table, drawn in DRAWN.items():
        records = stored(table)
        if all(name in records for name in CURVES[table]):
            written.append(folder / f"{table}.svg")
            drawn(records).savefig(written[-1], format="svg", metadata={"Date": None})
    return written


if __name__ == "__main__":
    print("\n".join(map(str, draw())) or "No runs of these tables are stored yet.", file=sys.stderr)
