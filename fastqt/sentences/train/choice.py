"""Which objective trains which model."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.text import Lexicon
from fastqt.sentences.train.objectives import Objective
from fastqt.sentences.train.ranks import Ranks


def build_objective(
    config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device, ranks: Ranks
) -> Objective[Any]:
    """The objective that the entry of the model kind names. For the arguments see `Objective`."""
    module, name = config.kind.objective_of(config).split(".")
    objective: type[Objective[Any]] = getattr(import_module(f"{__package__}.{module}"), name)
    return objective(config, corpus, vocabulary, device, ranks)
