"""Which objective trains which model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fastqt.sentences.train.objectives import Objective
from fastqt.sentences.train.training import Training


def build_objective(training: Training) -> Objective[Any]:
    """The objective of a training, which the entry of its model kind names."""
    config = training.config
    module, name = config.kind.objective_of(config).split(".")
    objective: type[Objective[Any]] = getattr(import_module(f"{__package__}.{module}"), name)
    return objective(training)
