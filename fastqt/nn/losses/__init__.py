"""Each loss as a module. What they have in common is in `fastqt.nn.losses.base`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fastqt.nn.losses.base import Loss, ScaledLoss, check_names
from fastqt.nn.losses.general import ContrastiveLoss, SigmoidLoss
from fastqt.nn.losses.gloss import GlossBagOfWordsLoss, GlossPositionalLoss
from fastqt.nn.losses.labels import NegativeSamplingLoss, NTXentLoss, SupConLoss
from fastqt.nn.losses.pairs import (
    CLIPLoss,
    GISTEmbedLoss,
    InfoNCELoss,
    MultipleNegativesRankingLoss,
    SigLIPLoss,
)
from fastqt.nn.losses.views import MixCSELoss, SimCSELoss
from fastqt.nn.losses.windows import BinaryWindowLoss, CURLBlockLoss, CURLLoss, MaxMarginLoss

MODULES: tuple[type[Loss], ...] = (
    *(ContrastiveLoss, SigmoidLoss, MaxMarginLoss, InfoNCELoss, SimCSELoss, MixCSELoss, CLIPLoss, SigLIPLoss),
    *(CURLLoss, CURLBlockLoss, GlossBagOfWordsLoss, GlossPositionalLoss),
    *(GISTEmbedLoss, SupConLoss, NTXentLoss, MultipleNegativesRankingLoss),
    *(BinaryWindowLoss, NegativeSamplingLoss),
)

__all__ = [
    "MODULES",
    "BinaryWindowLoss",
    "CLIPLoss",
    "CURLBlockLoss",
    "CURLLoss",
    "ContrastiveLoss",
    "GISTEmbedLoss",
    "GlossBagOfWordsLoss",
    "GlossPositionalLoss",
    "InfoNCELoss",
    "Loss",
    "MaxMarginLoss",
    "MixCSELoss",
    "MultipleNegativesRankingLoss",
    "NTXentLoss",
    "NegativeSamplingLoss",
    "ScaledLoss",
    "SigLIPLoss",
    "SigmoidLoss",
    "SimCSELoss",
    "SupConLoss",
    "check_options",
]


def check_options(function: Callable[..., Tensor], options: Mapping[str, Any]) -> None:
    """Checks the keyword arguments that a loss function is to be called with, before there is a batch.

    Args:
        function: one of this library, whose options' values are checked too, or any other.
        options: keyword arguments of the function.

    Raises:
        TypeError: a name that the function does not have.
        TypeError, ValueError: a value that a function of this library refuses.
    """
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        check_names(options, parameters, getattr(function, "__name__", str(function)))
    for module in MODULES:
        if module.function is function:
            module.check_values(options)
