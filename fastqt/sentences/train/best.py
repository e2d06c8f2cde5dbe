"""Which model of a training is the best on what is held out, and whether the training still improves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastqt.sentences.runs.config import DEV_MEASURE, TrainConfig
from fastqt.sentences.runs.metrics_file import goodness
from fastqt.sentences.runs.progress import Progress


class Best:
    """Judges each validation of a training by those before it, of which `progress` keeps what is needed.

    `TrainConfig.measure_of_best` says which figure decides. Where none does, no model is the best one, and
    the last is kept. All ranks judge the same lines of metrics, and so agree on what is kept and when the
    training ends. `progress` is changed in place.
    """

    def __init__(self, config: TrainConfig, progress: Progress) -> None:
        self.measure = config.measure_of_best
        self._patience, self._progress = config.early_stop, progress

    def takes(self, line: Mapping[str, float]) -> bool:
        """Whether a validation is better than all before it; a figure that is not a number never is."""
        if self.measure is None or (line["step"] == 0 and self.measure != DEV_MEASURE):
            return False

        progress, by_pairs = self._progress, self.measure == DEV_MEASURE
        is_better = goodness(line, self.measure) > (progress.best if by_pairs else -progress.best_loss)
        if is_better and by_pairs:
            progress.best = line[self.measure]
        elif is_better:
            progress.best_loss = line[self.measure]

        progress.since_best = 0 if is_better else progress.since_best + 1
        return is_better

    @property
    def is_kept(self) -> bool:
        """Whether model.safetensors holds the best model, and the last one is not written in its place.

        A resumed training may have another measure than before, of which nothing is known yet, or none.
        """
        if self.measure is None:
            return False
        by_pairs = self.measure == DEV_MEASURE
        return self._progress.best > -math.inf if by_pairs else self._progress.best_loss < math.inf

    @property
    def has_stalled(self) -> bool:
        """Whether as many validations were no better as the training is to stop after."""
        return self.is_kept and self._patience is not None and self._progress.since_best >= self._patience
