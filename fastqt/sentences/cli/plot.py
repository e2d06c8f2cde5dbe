"""fastqt plot: the figures that trainings have reported, as curves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fastqt.errors import InputError, one_line
from fastqt.sentences.cli.command import Command
from fastqt.sentences.options.option import option

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE = "training.svg"
CREATOR = "fastqt plot"  # stands in the drawing, by which it may be drawn anew
PERCENT = ("accuracy", "chance", "dev_spearman")  # figures whose names end so are drawn in per cent
UNITS = {"step": 1, "seconds": 3600, "cpu_seconds": 3600}  # of an axis, in that of metrics.jsonl
COLUMNS = 3
FEW = 30  # points of a curve that are marked

Lines = list[dict[str, float]]  # of a metrics.jsonl


@dataclass(frozen=True, kw_only=True)
class Plot(Command):
    """Writes training.svg, with a panel for each figure of metrics.jsonl.

    A thin line is on the training text, a thick one on held-out text, and a dotted one is that of chance.
    Each run has a colour of its own.
    """

    title: ClassVar[str] = "draw the figures that trainings have reported"

    runs: tuple[str, ...] = option(help="directories that train wrote", file="DIR", positional=True)
    over: Literal["step", "seconds", "cpu_seconds"] = option(
        "step", "the axis: steps, or hours by the clock or of the processors"
    )
    out: str | None = option(None, "directory to write to (default: the first run)", file="DIR")

    def run(self) -> int:
        from fastqt.sentences.runs.files import write_atomically
        from fastqt.sentences.runs.metrics_file import HELD_OUT, is_figure

        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise InputError("plot: needs matplotlib; pip install 'fastqt[plot]'") from None

        # matplotlib refuses what is not UTF-8.
        runs = [(one_line(Path(name).resolve().name), _lines_of(Path(name))) for name in self.runs]
        reported = (name for _, lines in runs for line in lines for name in line)
        names = dict.fromkeys(name.removeprefix(HELD_OUT) for name in reported if is_figure(name))
        panels = [name for name in names if name != "chance"]

        path = Path(self.out or self.runs[0], FILE)
        if path.exists() and f">{CREATOR}<" not in path.read_text(encoding="utf-8", errors="replace"):
            raise InputError(
                f"cannot write {path}: fastqt plot has not drawn what is there; want another out"
            )
        path.parent.mkdir(parents=True, exist_ok=True)

        columns = min(len(panels), COLUMNS)
        rows = math.ceil(len(panels) / columns)
        figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
        for number, panel in enumerate(panels, start=1):
            _draw(figure.add_subplot(rows, columns, number), panel, runs, self.over)
        save = partial(figure.savefig, format="svg", metadata={"Date": None, "Creator": CREATOR})
        write_atomically(path, save)
        print(path)
        return 0


def _lines_of(directory: Path) -> Lines:
    from fastqt.sentences.runs.checkpoint import CONFIG, METRICS
    from fastqt.sentences.runs.metrics_file import read_metrics

    if not (directory / CONFIG).exists():
        raise InputError(f"no trained model in {directory}: {CONFIG} is missing")
    lines = read_metrics(directory / METRICS, tell=True)
    if not lines:
        raise InputError(f"nothing to draw: {directory / METRICS} has no line yet")
    return lines


def _draw(axes: Axes, panel: str, runs: list[tuple[str, Lines]], over: str) -> None:
    from fastqt.sentences.runs.metrics_file import HELD_OUT

    curves: list[tuple[str, str, dict[str, Any]]] = [
        (panel, "", {"linewidth": 0.7}),
        (HELD_OUT + panel, ", held out", {"linewidth": 2.2}),
    ]
    if panel.endswith("accuracy"):
        curves.append(("chance", ", chance", {"linestyle": ":"}))
    factor = 100 if panel.endswith(PERCENT) else 1

    for number, (run, lines) in enumerate(runs):
        for name, remark, style in curves:
            told = [line for line in lines if {over, name} <= line.keys()]
            if told:
                x = [line[over] / UNITS[over] for line in told]
                y = [factor * line[name] for line in told]
                marker = "o" if len(told) <= FEW else ""
                style |= {"color": f"C{number}", "label": run + remark, "marker": marker, "markersize": 3}
                axes.plot(x, y, **style)

    title = panel.replace("_", " ")
    axes.set(xlabel="step" if over == "step" else "hours", ylabel=f"{title}, %" if factor == 100 else title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
