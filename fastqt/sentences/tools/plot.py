"""Draws the figures of trainings from the files that `fastqt train` and `fastqt evaluate` wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import field, has_type, read_object
from fastqt.sentences.runs.card import LARGEST_FILE
from fastqt.sentences.runs.checkpoint import CONFIG, EVALUATION, METRICS
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.figures import HELD_OUT, is_figure
from fastqt.sentences.runs.files import write_atomically
from fastqt.sentences.runs.metrics_file import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CREATOR = "fastqt plot"  # stands in each figure, by which it may be drawn anew
PERCENT = ("accuracy", "chance", "dev_spearman")  # figures whose names end so are drawn in per cent


class Panel(NamedTuple):
    """A quantity of the training curves: its title, and its name in metrics.jsonl."""

    title: str
    name: str

    @property
    def label(self) -> str:
        """That of the axis."""
        return f"{self.title}, %" if self.name.endswith(PERCENT) else self.title


PANELS = (
    Panel("loss", "loss"),
    Panel("forward accuracy", "forward_accuracy"),
    Panel("backward accuracy", "backward_accuracy"),
    Panel("accuracy", "accuracy"),
    Panel("mean reciprocal rank", "mrr"),
    Panel("cosine of positives", "positive_cosine"),
    Panel("cosine of negatives", "negative_cosine"),
    Panel("cosine of mixed negatives", "mixed_cosine"),
    Panel("cosine of hard negatives", "hard_negative_cosine"),
    Panel("alignment", "alignment"),
    Panel("uniformity", "uniformity"),
    Panel("loss per word", "loss_per_word"),
    Panel("loss of masked words", "masked_word_loss"),
    Panel("norm of latent vectors", "latent_norm"),
    Panel("learning rate", "learning_rate"),
    Panel("scale of the loss", "scale"),
    Panel("Spearman of development pairs", "dev_spearman"),
)
PANELS_PER_ROW = 3
FEW = 30  # points of a curve that are marked
# The metrics on held-out data that are drawn over the hours of training.
HELD_OUT_PANELS = (
    Panel("Spearman of development pairs", "dev_spearman"),
    Panel("held-out forward accuracy", "validation_forward_accuracy"),
    Panel("held-out backward accuracy", "validation_backward_accuracy"),
)


@dataclass(frozen=True)
class Run:
    """The stored data of one training."""

    name: str
    config: TrainConfig
    lines: list[dict[str, float]]  # of metrics.jsonl
    # From evaluation.json; None if the run was not evaluated.
    accuracy: Any  # mean over the classification tasks, in per cent
    width: Any  # of a sentence vector

    @classmethod
    def load(cls, directory: str | Path) -> Run:
        """Reads the files in a directory that `fastqt train` wrote."""
        directory = Path(directory)
        config = TrainConfig.load(directory / CONFIG)
        lines = read_metrics(directory / METRICS, tell=True)
        if not lines:
            raise InputError(f"nothing to draw: {directory / METRICS} has no line yet")
        name = one_line(directory.resolve().name)  # matplotlib refuses what is not UTF-8
        return cls(name, config, lines, *_evaluation(directory / EVALUATION))

    def series(self, name: str, over: str = "step") -> tuple[list[float], list[float]]:
        """The values of a metric of metrics.jsonl over the steps, at all lines that report it.

        Over "seconds" they are over hours. Accuracies and Spearman's coefficients are in per cent.
        """
        lines = [line for line in self.lines if name in line and over in line]
        unit = 3600 if over == "seconds" else 1
        factor = 100 if name.endswith(PERCENT) else 1
        return [line[over] / unit for line in lines], [factor * line[name] for line in lines]

    def has(self, name: str) -> bool:
        """Whether any line reports this metric."""
        return any(name in line for line in self.lines)

    @property
    def hours(self) -> float:
        """The time of the whole training."""
        return self.lines[-1].get("seconds", math.nan) / 3600


def _evaluation(path: Path) -> tuple[Any, Any]:
    if not path.exists():
        return None, None
    try:
        results = read_object(path, most_bytes=LARGEST_FILE)
        width = field(results, "width", int, path)
        tasks = [each for each in field(results, "tasks", dict, path).values() if has_type(each, dict)]
        accuracies = [field(each, "accuracy", float, path) for each in tasks if "accuracy" in each]
    except InputError as error:
        raise InputError(f"{path} is not what `fastqt evaluate --json` writes: {error}") from error
    return (100 * sum(accuracies) / len(accuracies) if accuracies else None), width


def draw_figures(directories: Sequence[str | Path], out: str | Path) -> list[Path]:
    """Draws all figures for which the runs have data, into a directory, and returns the paths of the files.

    - training.svg: each quantity over the steps in a panel of its own; a thin line on the training text, a
      thick one on held-out text, and a dotted one for chance.
    - efficiency.svg: the metrics on held-out data over the hours of training, and the mean accuracy of the
      evaluation over the hours of the whole training.
    - sizes.svg: that mean accuracy over the width of a sentence vector.
    - views.svg: uniformity over alignment, one point per report; later reports are darker.

    Each run, a directory that `fastqt train` wrote, has a colour of its own. It has an evaluation.json if it
    was evaluated. The points of a curve are marked where they are few.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InputError("plot: needs matplotlib; pip install 'fastqt[plot]'") from None

    runs = [Run.load(directory) for directory in directories]
    evaluated = [run for run in runs if run.accuracy is not None]
    views = [run for run in runs if run.has("uniformity")]

    figures: dict[str, list[Callable[[Axes], None]]] = {
        "training": [
            partial(_training, runs=runs, panel=panel)
            for panel in (*PANELS, *_further_panels(runs))
            if any(run.has(name) for run in runs for name in (panel.name, HELD_OUT + panel.name))
        ],
        "efficiency": [
            *(
                partial(_efficiency, runs=runs, panel=panel)
                for panel in HELD_OUT_PANELS
                if any(run.has(panel.name) for run in runs)
            ),
            *([partial(_scores, runs=evaluated, over="hours")] if evaluated else []),
        ],
        "sizes": [partial(_scores, runs=evaluated, over="width")] if len(evaluated) > 1 else [],
        "views": [partial(_views, runs=views)] if views else [],
    }

    Path(out).mkdir(parents=True, exist_ok=True)
    for path in (Path(out, f"{name}.svg") for name, panels in figures.items() if panels):
        if path.exists() and f">{CREATOR}<" not in path.read_text(encoding="utf-8", errors="replace"):
            raise InputError(
                f"cannot write {path}: fastqt plot has not drawn what is there; want another out"
            )
    written = []
    for name, panels in figures.items():
        if panels:
            columns = min(len(panels), PANELS_PER_ROW)
            rows = math.ceil(len(panels) / columns)
            figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
            for number, draw in enumerate(panels, start=1):
                axes = figure.add_subplot(rows, columns, number)
                draw(axes)
                axes.grid(alpha=0.3)
                axes.legend(fontsize="small")
            written.append(Path(out) / f"{name}.svg")
            save = partial(figure.savefig, format="svg", metadata={"Date": None, "Creator": CREATOR})
            write_atomically(written[-1], save)
    return written


def _further_panels(runs: list[Run]) -> list[Panel]:
    """The figures of the model that have no title of their own, such as those of a new model kind."""
    reported = dict.fromkeys(
        name.removeprefix(HELD_OUT) for run in runs for line in run.lines for name in line
    )
    titled = {panel.name for panel in PANELS}
    return [
        Panel(name.replace("_", " "), name)
        for name in reported
        if name not in titled and name != "chance" and is_figure(name)
    ]


def _training(axes: Axes, runs: list[Run], panel: Panel) -> None:
    for number, run in enumerate(runs):
        colour = f"C{number}"
        for name, width, remark in ((panel.name, 0.7, ""), (HELD_OUT + panel.name, 2.2, ", held out")):
            _curve(axes, *run.series(name), color=colour, linewidth=width, label=run.name + remark)
        if panel.name.endswith("accuracy"):
            _curve(axes, *run.series("chance"), color=colour, linestyle=":", label=f"{run.name}, chance")
    axes.set(xlabel="step", ylabel=panel.label)


def _curve(axes: Axes, x: list[float], y: list[float], **style: Any) -> None:
    """Draws a curve, if there is any point; points that are few are marked."""
    if x:
        axes.plot(x, y, marker="o" if len(x) <= FEW else "", markersize=3, **style)


def _efficiency(axes: Axes, runs: list[Run], panel: Panel) -> None:
    for number, run in enumerate(runs):
        _curve(axes, *run.series(panel.name, over="seconds"), color=f"C{number}", label=run.name)
    axes.set(xlabel="hours of training", ylabel=panel.label)


def _scores(axes: Axes, runs: list[Run], over: str) -> None:
    for run in runs:
        axes.plot(getattr(run, over), run.accuracy, "o", label=run.name)
    label = {"hours": "hours of training", "width": "width of a sentence's vector"}[over]
    axes.set(xlabel=label, ylabel="mean accuracy, %")


def _views(axes: Axes, runs: list[Run]) -> None:
    for number, run in enumerate(runs):
        lines = [line for line in run.lines if {"alignment", "uniformity"} <= line.keys()]
        last = max((line["step"] for line in lines), default=0)
        for line in lines:
            age = 1 - line["step"] / last if last else 0.0
            label = run.name if line is lines[-1] else None
            point = line["alignment"], line["uniformity"]
            axes.plot(*point, ".", color=f"C{number}", alpha=1 - 0.8 * age, label=label)
    axes.set(xlabel="alignment", ylabel="uniformity")
