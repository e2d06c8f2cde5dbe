"""Builds the model of pairs as a run's settings describe it, and says what its texts begin with."""

from __future__ import annotations

from typing import Any

from fastqt.errors import InputError
from fastqt.exclusions import Margin
from fastqt.matryoshka import Matryoshka, prefixes_of
from fastqt.nn import DistillationLoss, Encoder, GISTEmbedLoss, MultipleNegativesRankingLoss, SimCSE
from fastqt.nn.losses import Loss
from fastqt.sentences.runs.config import TrainConfig
from fastqt.sentences.runs.views_options import largest_scale
from fastqt.sentences.text import Prompts


class PairsModel(SimCSE):
    """One encoder for queries and documents, without dropout of its own, and the loss that ranks them.

    `loss` is one of `MultipleNegativesRankingLoss`, `GISTEmbedLoss` and `DistillationLoss`.
    """

    def __init__(self, encoder: Encoder, loss: Loss) -> None:
        self._set_up(encoder, 0.0, None, loss)


def build_pairs_model(config: TrainConfig, encoder: Encoder) -> PairsModel:
    """The model of pairs around an encoder, with the loss that the settings name.

    InputError for Matryoshka dimensions that the encoder's vectors do not have.
    """
    try:
        prefixes_of(_matryoshka(config), encoder.embedding_dim)
        return PairsModel(encoder, _loss(config))
    except (TypeError, ValueError) as error:
        raise InputError(_of_settings(str(error))) from error


def _matryoshka(config: TrainConfig) -> Matryoshka | None:
    dims = config.matryoshka_dims
    return None if dims is None else Matryoshka(dims, config.matryoshka_weights)


def _of_settings(message: str) -> str:
    """What a loss says of its argument, with the name of the setting."""
    argument, colon, what = message.partition(":")
    settings = {"matryoshka": "matryoshka_dims", "dims": "matryoshka_dims", "weights": "matryoshka_weights"}
    return settings.get(argument, argument) + colon + what


def _loss(config: TrainConfig) -> Loss:
    # The configuration has checked the texts.
    shared: dict[str, Any] = {
        "scale": config.scale,
        "learn_scale": config.learn_scale,
        "max_scale": largest_scale(config) if config.learn_scale else None,
    }
    if config.loss == "distillation":
        return DistillationLoss(teacher_scale=config.teacher_scale, **shared)

    strategy: Any = config.margin_strategy
    if config.loss == "gist":
        directions = config.directions or ("query_to_query", "doc_to_doc")
        return GISTEmbedLoss(
            margin=config.guide_margin,
            margin_strategy=strategy,
            contrast_anchors="query_to_query" in directions,
            contrast_positives="doc_to_doc" in directions,
            **shared,
        )

    of_ranking: dict[str, Any] = {
        "directions": config.directions or ("query_to_doc",),
        "partition_mode": config.partition_mode,
        "hardness_mode": config.hardness_mode,
        "hardness_strength": config.hardness_strength,
        "matryoshka": _matryoshka(config),
    }
    if config.false_negative_margin is not None:
        of_ranking["exclude"] = Margin(config.false_negative_margin, strategy)
    return MultipleNegativesRankingLoss(**of_ranking, **shared)


def prompts_of(config: TrainConfig) -> Prompts:
    """What the texts of a run's model begin with."""
    return Prompts(config.query_prompt, config.document_prompt)
