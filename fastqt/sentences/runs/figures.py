"""What the figures in a line of metrics.jsonl mean: which are shown, and which validation is the best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TypeVar

from fastqt.sentences.runs.config import DEV_MEASURE

HELD_OUT = "validation_"  # begins the names of figures of held-out text
NO_FIGURES = ("step", "epoch", "learning_rate", "loss_scale")
OF_THE_CLOCK = ("seconds", "_per_second", "_bytes")  # endings of what differs from one machine to another

Line = Mapping[str, float]
L = TypeVar("L", bound=Line)


def is_figure(name: str) -> bool:
    """Whether a name is that of a figure of the model, and not of its schedule, the clock or the machine."""
    return name not in NO_FIGURES and not name.endswith(OF_THE_CLOCK)


def goodness(line: Line, measure: str | None) -> float:
    """How good the model of a validation is by the figure that decides, the higher the better.

    It is NaN where the validation does not count. The loss of fresh weights does not: it can be low, as
    SimCSE's often is, though the vectors are of no use. Their coefficient on development pairs does.
    """
    if measure is None or (line["step"] == 0 and measure != DEV_MEASURE):
        return math.nan
    figure = line.get(measure, math.nan)
    return figure if measure == DEV_MEASURE else -figure


def best_of(lines: Iterable[L], measure: str | None) -> L | None:
    """The line of the model that is kept, the first of equal ones; None where no figure decides."""
    counted = [line for line in lines if not math.isnan(goodness(line, measure))]
    return max(counted, key=lambda line: goodness(line, measure), default=None)
