"""Which objective trains which model."""

from __future__ import annotations

from typing import Any

import torch

from fastqt.runs.config import TrainConfig
from fastqt.runs.views_options import reads_rows
from fastqt.text import Lexicon
from fastqt.train.objectives import ContextObjective, GlossObjective, Objective
from fastqt.train.ranks import Ranks
from fastqt.train.skip_thoughts import SkipThoughtsObjective
from fastqt.train.views import TripletsObjective, ViewsObjective


def build_objective(
    config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device, ranks: Ranks
) -> Objective[Any]:
    """The objective of the model that the settings name. For the arguments see `Objective`."""
    classes: dict[str, type[Objective[Any]]] = {"quickthoughts": ContextObjective}
    classes |= {"skip-thoughts": SkipThoughtsObjective}
    classes |= {"gloss-bow": GlossObjective, "gloss-pos": GlossObjective}
    of_views = TripletsObjective if reads_rows(config) else ViewsObjective
    return classes.get(config.model, of_views)(config, corpus, vocabulary, device, ranks)
