"""Which objective trains which model."""

from __future__ import annotations

from typing import Any

import torch

from fastqt.runs.config import TrainConfig
from fastqt.text import Lexicon
from fastqt.train.objectives import ContextObjective, GlossObjective, Objective
from fastqt.train.ranks import Ranks
from fastqt.train.skip_thoughts import SkipThoughtsObjective
from fastqt.train.views import ViewsObjective


def build_objective(
    config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device, ranks: Ranks
) -> Objective[Any]:
    """The objective of the model that the settings name. For the arguments see `Objective`."""
    classes: dict[str, type[Objective[Any]]] = {"quickthoughts": ContextObjective}
    classes |= {"skip-thoughts": SkipThoughtsObjective}
    classes |= {"gloss-bow": GlossObjective, "gloss-pos": GlossObjective}
    return classes.get(config.model, ViewsObjective)(config, corpus, vocabulary, device, ranks)
