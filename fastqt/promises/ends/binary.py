"""Losses of each score by itself: logsigmoid of labels 1 and -1, and binary cross-entropies."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.functional import sigmoid_loss
from fastqt.promises.ends.arguments import computed, like
from fastqt.promises.ends.weights import listed
from fastqt.promises.patterns import Pattern
from fastqt.promises.promise import known
from fastqt.promises.rules import RULES
from fastqt.promises.scores import LogSigmoids, Product, Scores, WeightedScores
from fastqt.targets.base import Targets

rule = RULES.rule


def _of_sigmoids(p: Product) -> dict[str, Any]:
    """A product as the sigmoid loss takes it."""
    p = p.for_loss()
    options = {name: getattr(p, name) for name in ("queries", "candidates", "scale", "bias")}
    return {**options, "normalize": p.is_cosine}


@rule(F.logsigmoid)
def log_sigmoids(s: Any) -> Any:
    weighted = known(s, WeightedScores)
    if weighted is None or weighted.of.row is not None:
        return NotImplemented
    weights = weighted.weights.table if isinstance(weighted.weights, Pattern) else weighted.weights
    return LogSigmoids(weighted) if bool((weights.abs() == 1).all()) else NotImplemented


def sum_of_log_sigmoids(weighted: WeightedScores) -> Any:
    """The labels 1 and -1 of a score are the targets 1 and 0 of the sigmoid loss."""
    p, weights = weighted.of.first, weighted.weights
    if isinstance(weights, Pattern):
        targets = _targets(weights.with_table(weights.table > 0), p)
    else:
        targets = (weights > 0).to(torch.promote_types(p.queries.dtype, torch.float32))
    loss = computed(sigmoid_loss, **_of_sigmoids(p), targets=targets, reduction="sum")
    return loss if loss is NotImplemented else -loss


def _targets(pattern: Pattern, p: Product) -> Targets | Tensor:
    """A mask as targets of a loss of this product."""
    entries = listed(pattern)
    dtype = torch.promote_types(p.queries.dtype, torch.float32)
    return pattern.cells().to(dtype) if entries is None else entries


@rule(F.binary_cross_entropy_with_logits)
def binary_cross_entropy(
    s: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    scores = known(s, Scores)
    p = None if scores is None else scores.alone
    plain = weight is None and size_average is None and reduce is None and pos_weight is None
    if p is None or not plain or not p.is_plain or reduction == "none":
        return NotImplemented

    pattern = known(target, Pattern)
    if type(target) is not Tensor and pattern is None:
        return NotImplemented
    if tuple(target.shape) != tuple(s.shape) or target.requires_grad or not target.is_floating_point():
        return NotImplemented
    if target.dtype != s.dtype:
        return NotImplemented
    if not bool(((target if pattern is None else pattern.table) >= 0).all()):
        return NotImplemented
    if pattern is None:
        targets = target.to(torch.promote_types(p.queries.dtype, torch.float32))
    else:
        targets = _targets(pattern, p)
    loss = computed(sigmoid_loss, **_of_sigmoids(p), targets=targets, reduction="sum")
    if loss is NotImplemented:
        return loss
    return like(loss if reduction == "sum" else loss / s.numel(), s)
