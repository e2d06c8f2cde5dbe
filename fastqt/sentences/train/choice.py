"""Which objective trains which model."""

from __future__ import annotations

from typing import Any

import torch

from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.views_options import reads_rows
from fastqt.sentences.text import Lexicon
from fastqt.sentences.train.combined import CombinedObjective
from fastqt.sentences.train.objectives import ContextObjective, GlossObjective, Objective
from fastqt.sentences.train.pairs import PairsObjective
from fastqt.sentences.train.ranks import Ranks
from fastqt.sentences.train.skip_thoughts import SkipThoughtsObjective
from fastqt.sentences.train.views import TripletsObjective, ViewsObjective


def build_objective(
    config: TrainConfig, corpus: list[str], vocabulary: Lexicon, device: torch.device, ranks: Ranks
) -> Objective[Any]:
    """The objective of the model that the settings name. For the arguments see `Objective`."""
    classes: dict[str, type[Objective[Any]]] = {
        "quickthoughts": ContextObjective,
        "skip-thoughts": SkipThoughtsObjective,
        "pairs": PairsObjective,
        "gloss-bow": GlossObjective,
        "gloss-pos": GlossObjective,
    }
    if config.encoder_kind.parts:
        return CombinedObjective(config, corpus, vocabulary, device, ranks)
    of_views = TripletsObjective if reads_rows(config) else ViewsObjective
    return classes.get(config.model, of_views)(config, corpus, vocabulary, device, ranks)
