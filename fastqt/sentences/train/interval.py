"""The figures of the steps between two reports: means over their rows, and not those of the last batch."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastqt.sentences.runs.progress import Progress, Sums

MEASURED = 5  # steps between two reports in which more than the loss is measured, which costs products


class Interval:
    """The means over the rows of all steps since the last report, of the loss and of what else is measured.

    The loss is that of every step. The other figures are those of about MEASURED steps, at equal distances,
    and of the last. A report of fewer rows than a batch has, such as that of an epoch's short last one, is of
    the rows of the report before it too. `batch` is the rows of a step of all ranks.

    `progress` keeps the sums, so that a resumed training reports what one does that was never stopped.
    """

    def __init__(self, progress: Progress, report_every: int, batch: int) -> None:
        self._progress, self._batch = progress, batch
        self._measures_every = max(report_every // MEASURED, 1)
        # The sum of the losses and the number of their rows stay where they are computed: the host does not
        # wait for a GPU in each step.
        self._loss: Tensor | None = None

    def add(
        self, loss: Tensor, rows: int, measure: Callable[[], dict[str, float]], *, reports: bool = False
    ) -> None:
        """Takes a step with so many rows; `measure` is called if its other figures count.

        A loss that is not finite is left out: either its step ends the training, or float16 has overflowed,
        and there was no step.
        """
        if self._loss is None:
            before = self._progress.summed.get("loss", (0.0, 0.0))
            self._loss = torch.tensor(before, dtype=torch.float64, device=loss.device)
        finite = loss.isfinite()
        self._loss += torch.stack([torch.where(finite, loss, 0.0).double() * rows, finite.double() * rows])

        if reports or self._progress.step % self._measures_every == 0:
            figures = {name: (value * rows, float(rows)) for name, value in measure().items()}
            self._progress.summed = _added(self._progress.summed, figures)

    def means(self) -> dict[str, float]:
        """The figures of a report that comes now."""
        return {name: total / rows if rows else math.nan for name, (total, rows) in self._sums().items()}

    def begin(self) -> None:
        """Begins the next interval, after a report."""
        self._progress.summed_before, self._progress.summed = self._sums(), {}
        self._loss = None

    def store(self) -> None:
        """Has the progress keep the sum of the losses too, for a checkpoint."""
        if self._loss is not None:
            total, rows = self._loss.tolist()
            self._progress.summed = {"loss": (total, rows)} | {
                name: sums for name, sums in self._progress.summed.items() if name != "loss"
            }

    def _sums(self) -> Sums:
        self.store()
        progress = self._progress
        if progress.summed.get("loss", (0.0, 0.0))[1] >= self._batch:
            return progress.summed
        return _added(progress.summed, progress.summed_before)


def _added(these: Sums, others: Sums) -> Sums:
    """The sums of both, in the order of the first; a figure that only one of them has stays as it is."""
    sums = dict(these)
    for name, (total, rows) in others.items():
        before = sums.get(name, (0.0, 0.0))
        sums[name] = before[0] + total, before[1] + rows
    return sums
