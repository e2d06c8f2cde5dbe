"""Each loss as a module. What they have in common is in `fastqt.nn.losses.base`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fastqt.nn.losses import modules
from fastqt.nn.losses.base import Loss, ScaledLoss, check_names
from fastqt.nn.losses.modules import (
    BinaryWindowLoss,
    CLIPLoss,
    ContrastiveLoss,
    CURLBlockLoss,
    CURLLoss,
    GISTEmbedLoss,
    GlossBagOfWordsLoss,
    GlossPositionalLoss,
    InfoNCELoss,
    MaxMarginLoss,
    MixCSELoss,
    MultipleNegativesRankingLoss,
    NegativeSamplingLoss,
    NTXentLoss,
    SigLIPLoss,
    SigmoidLoss,
    SimCSELoss,
    SupConLoss,
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

MODULES: tuple[type[Loss], ...] = tuple(
    value
    for value in vars(modules).values()
    if isinstance(value, type) and value.__module__ == modules.__name__
)


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
