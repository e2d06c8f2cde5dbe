"""What a training measures of its steps, and of its model on held-out text and on development pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastqt.errors import InputError
from fastqt.nn.modes import evaluating
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.runs.config import DEV_MEASURE, TrainConfig
from fastqt.sentences.runs.metrics_file import goodness
from fastqt.sentences.runs.progress import Progress
from fastqt.sentences.train.interval import Interval
from fastqt.sentences.train.objectives import Measured, Objective, Training

if TYPE_CHECKING:
    from fastqt.sentences.evaluation.similarity import DevelopmentPairs


class Measurements:
    """Makes the lines of metrics.jsonl, on rank 0.

    The best model is written to the training's directory, if there is a figure that decides (`Best`), and its
    figure into its progress, in place. `can_validate` says whether there is held-out text or a file of
    development pairs.
    """

    def __init__(self, training: Training, objective: Objective[Any]) -> None:
        self.objective, config = objective, training.config
        self.directory, self.progress, self.ranks = training.directory, training.progress, training.ranks
        self.best = Best(config, training.progress)
        self.interval = Interval(
            training.progress, config.report_every, config.batch_size * training.ranks.size
        )
        self.can_validate = config.valid is not None or config.dev is not None
        self.dev_pairs = None
        if config.dev is not None and self.ranks.is_first:
            self.dev_pairs = _development_pairs(config.dev)

    def add(self, loss: Tensor, measured: Measured, rows: int, *, reports: bool) -> None:
        """Takes a step of so many rows of all ranks into the means of the next report, on rank 0."""
        if self.ranks.is_first:
            self.interval.add(loss, rows, lambda: self.objective.measure(measured), reports=reports)

    def line(self, validates: bool) -> dict[str, float]:
        """A line of metrics: that of rank 0, for which the others wait if it validates."""

        def measure() -> dict[str, float]:
            line = {"step": self.progress.step, **self.interval.means()}
            return line | self._validate() if validates else line

        if validates:
            return self._judged(self.ranks.first(measure))
        return measure() if self.ranks.is_first else {}

    def early_line(self, measured: Measured) -> dict[str, float]:
        """The line of a report that is only shown, because the clock says when it comes.

        What no step before it was measured for is that of this step.
        """
        means, figures = self.interval.means(), self.objective.measure(measured)
        return {"step": self.progress.step, "loss": means["loss"], **figures, **means}

    def of_fresh_weights(self) -> dict[str, float]:
        """The line of a model that has not been trained yet: its validation.

        It does not change the random numbers of the training.
        """

        def measure() -> dict[str, float]:
            states = checkpoint.generator_states()
            line = {"step": self.progress.step, **self._validate()}
            checkpoint.set_generator_states(states, self.directory)
            return line

        return self._judged(self.ranks.first(measure))

    def check_finite(self, loss: Tensor) -> None:
        """Raises InputError if the loss is not finite."""
        if not math.isfinite(loss.item()):
            step = self.progress.step
            raise InputError(
                f"the loss is {loss.item()} at step {step}: start again with a lower learning_rate"
            )

    def check_weights(self) -> None:
        """Raises InputError if a weight is not finite, before such a model takes the place of a good one."""
        for name, weight in self.objective.model.named_parameters():
            if not weight.isfinite().all():
                raise InputError(
                    f"the weights {name} are not finite after step {self.progress.step}, and were not saved: "
                    "start again with a lower learning_rate"
                )

    def _judged(self, line: dict[str, float]) -> dict[str, float]:
        """The line of a validation, after its model was written if it is the best so far."""
        if self.best.takes(line):
            path = self.directory / checkpoint.MODEL
            self.ranks.first(lambda: checkpoint.save_model(path, self.objective.model))
        return line

    def _validate(self) -> dict[str, float]:
        line = self.objective.validate() if self.objective.held_out else {}
        return line if self.dev_pairs is None else line | self._evaluate_pairs(self.dev_pairs)

    def _evaluate_pairs(self, pairs: DevelopmentPairs) -> dict[str, float]:
        """Evaluates the model on the development pairs."""
        model, training = self.objective.model, self.objective.training
        encoder = SentenceEncoder(model, training.vocabulary, training.device, training.config)
        with evaluating(model):
            return pairs.evaluate(encoder.encode)


def _development_pairs(path: str) -> DevelopmentPairs:
    try:
        from fastqt.sentences.evaluation.similarity import DevelopmentPairs
    except ModuleNotFoundError as error:
        raise InputError(f"dev: needs {error.name}: pip install 'fastqt[eval]'") from error
    return DevelopmentPairs(path)


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
        progress = self._progress
        is_better = goodness(line, self.measure) > self._best
        if is_better:
            setattr(progress, "best" if self.measure == DEV_MEASURE else "best_loss", line[self.measure])
        progress.since_best = 0 if is_better else progress.since_best + 1
        return is_better

    @property
    def _best(self) -> float:
        """How good the best validation was; minus infinity where there was none."""
        progress = self._progress
        return progress.best if self.measure == DEV_MEASURE else -progress.best_loss

    @property
    def is_kept(self) -> bool:
        """Whether model.safetensors holds the best model, and the last one is not written in its place.

        A resumed training may have another measure than before, of which nothing is known yet, or none.
        """
        return self.measure is not None and self._best > -math.inf

    @property
    def has_stalled(self) -> bool:
        """Whether as many validations were no better as the training is to stop after."""
        return self.is_kept and self._patience is not None and self._progress.since_best >= self._patience
