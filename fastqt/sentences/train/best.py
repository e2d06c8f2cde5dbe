"""Which model of a training is the best on what is held out, and whether the training still improves."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fastqt.sentences.runs.config import DEV_MEASURE, TrainConfig
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
        """Whether a validation is better than all before it; a figure that is not a number never is.

        The loss of fresh weights does not count: it can be low, as SimCSE's often is, though the vectors are
        of no use. Their coefficient on development pairs does.
        """
        progress, is_fresh = self._progress, line["step"] == 0
        if self.measure is None or (is_fresh and self.measure != DEV_MEASURE):
            return False

        figure = line[self.measure]
        if self.measure == DEV_MEASURE:
            is_better = figure > progress.best
            progress.best = figure if is_better else progress.best
        else:
            is_better = figure < progress.best_loss
            progress.best_loss = figure if is_better else progress.best_loss

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
