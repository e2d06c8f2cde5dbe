"""What a training measures of its steps, and of its model on held-out text and on development pairs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fastqt.errors import InputError
from fastqt.nn.modes import evaluating
from fastqt.sentences.inference.encoder import SentenceEncoder
from fastqt.sentences.runs import checkpoint
from fastqt.sentences.train.average import Average
from fastqt.sentences.train.best import Best
from fastqt.sentences.train.objectives import Measured, Objective
from fastqt.sentences.train.training import Training

if TYPE_CHECKING:
    from fastqt.sentences.evaluation.development import DevelopmentPairs


class Measurements:
    """Makes the lines of metrics.jsonl, on rank 0.

    The best model is written to the training's directory, if there is a figure that decides (`Best`), and its
    figure into its progress, in place. `can_validate` says whether there is held-out text or a file of
    development pairs.
    """

    def __init__(self, training: Training, objective: Objective[Any], average: Average) -> None:
        self.objective, self.average, config = objective, average, training.config
        self.directory, self.progress, self.ranks = training.directory, training.progress, training.ranks
        self.best = Best(config, training.progress)
        self.can_validate = config.valid is not None or config.dev is not None
        self.dev_pairs = None
        if config.dev is not None and self.ranks.is_first:
            self.dev_pairs = _development_pairs(config.dev)

    def line(self, loss: Tensor, measured: Measured, validates: bool) -> dict[str, float]:
        """A line of metrics: that of rank 0, for which the others wait if it validates."""

        def measure() -> dict[str, float]:
            line = {"step": self.progress.step, "loss": loss.item(), **self.objective.measure(measured)}
            return line | self._validate() if validates else line

        if validates:
            return self._judged(self.ranks.first(measure))
        return measure() if self.ranks.is_first else {}

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
            self.ranks.first(lambda: checkpoint.save_model(path, self.average.model))
        return line

    def _validate(self) -> dict[str, float]:
        with self.objective.measuring(self.average.model):
            line = self.objective.validate() if self.objective.held_out else {}
            if self.dev_pairs is not None:
                line |= self._evaluate_pairs(self.dev_pairs)
        return line

    def _evaluate_pairs(self, pairs: DevelopmentPairs) -> dict[str, float]:
        """Evaluates the model on the development pairs."""
        model, training = self.objective.model, self.objective.training
        encoder = SentenceEncoder(model, training.vocabulary, training.device, training.config)
        with evaluating(model):
            return pairs.evaluate(encoder.encode)


def _development_pairs(path: str) -> DevelopmentPairs:
    try:
        from fastqt.sentences.evaluation.development import DevelopmentPairs
    except ModuleNotFoundError as error:
        raise InputError(f"dev: needs {error.name}: pip install 'fastqt[eval]'") from error
    return DevelopmentPairs(path)
