"""Cross-entropies of indices and of probabilities, log-softmax and what programs make of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.functional import contrastive_loss, log_sum_exp
from fastqt.losses.common import joined_loss
from fastqt.promises.directions import PairLoss, can_wait
from fastqt.promises.ends.arguments import Columns, columns_of, computed, like, with_rows
from fastqt.promises.ends.weights import sums_of_weights, total_of_weights
from fastqt.promises.notes import are_row_numbers
from fastqt.promises.patterns import Pattern
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES
from fastqt.promises.scores import LogProbabilities, Product, Scores
from fastqt.targets import Pairs
from fastqt.torch_modes import is_transformed

T = Tensor
rule = RULES.rule


def loss_of_targets(scores: Scores, target: Tensor, ignore_index: int, reduction: str) -> Any:
    """The cross-entropy of rows with their target columns, without those that are ignored."""
    columns = columns_of(scores)
    if columns is None:
        return NotImplemented
    if not columns.first and _are_pairs(columns.product, target, ignore_index):
        return _loss_of_pairs(scores, columns, reduction)

    product, first = columns.product, columns.first
    ignored = target == ignore_index
    if columns.numbers is None and not first and ignore_index == -100 and target.is_cpu:
        # There the loss refuses what is no target.
        loss = computed(contrastive_loss, **columns.options, targets=target, reduction=_whole(reduction))
        return _finished(loss, scores, (~ignored).sum(), reduction)
    used = target.masked_fill(ignored, first)
    within = (used >= first) & (used < first + len(product.candidates))
    if not bool(within.all()):
        loss = _losses_of_numbers(scores, columns, target, ignored)
        loss = loss if loss is NotImplemented or reduction == "none" else loss.sum()
        return _finished(loss, scores, (~ignored).sum(), reduction)
    used = used - first
    if _hits(product, used, ignored):
        return NotImplemented
    targets = used.masked_fill(ignored, -100)
    loss = computed(contrastive_loss, **columns.options, targets=targets, reduction=_whole(reduction))
    return _finished(loss, scores, (~ignored).sum(), reduction)


def _whole(reduction: str) -> str:
    """Of a sum the gradients are computed beside it; a mean is one divided."""
    return "none" if reduction == "none" else "sum"


def _loss_of_pairs(scores: Scores, columns: Columns, reduction: str) -> Any:
    loss = computed(contrastive_loss, **columns.options, targets=Pairs(), reduction=reduction)
    return loss if loss is NotImplemented else with_rows(loss, scores)


def _are_pairs(product: Product, target: Tensor, ignore_index: int) -> bool:
    """Whether the target of each row is the candidate of its index, and every row has one."""
    N = target.shape[0]
    if product.candidates.shape[0] < N or not are_row_numbers(target):
        return False
    is_free = product.is_plain or (product.mask is not None and not bool(product.mask.diagonal().any()))
    return not 0 <= ignore_index < N and product.diagonal == "keep" and is_free


def _promised_loss(
    s: Promise, scores: Scores, target: Tensor, ignore_index: int, reduction: str, *, casts: bool
) -> Any:
    """The cross-entropy of rows, which may wait for the other direction of the matrix."""
    with torch._C.DisableTorchFunctionSubclass():
        dtype = torch.float32 if casts and torch.is_autocast_enabled(s.device.type) else s.dtype

    def in_dtype(loss: Any) -> Any:
        return loss if loss is NotImplemented else loss.to(dtype)

    p = scores.alone
    waits = can_wait(p) and reduction in ("mean", "sum") and not is_transformed()
    if p is None or not waits or not _are_pairs(p, target, ignore_index):
        return in_dtype(loss_of_targets(scores, target, ignore_index, reduction))

    def alone() -> Any:
        columns = columns_of(scores)
        return NotImplemented if columns is None else in_dtype(_loss_of_pairs(scores, columns, reduction))

    count = target.shape[0] if reduction == "mean" else 1
    return PairLoss(size=(), dtype=dtype, product=p, count=count, alone=alone)


def _finished(loss: Any, scores: Scores, count: int | Tensor, reduction: str) -> Any:
    if loss is NotImplemented:
        return loss
    loss = with_rows(loss, scores)
    return loss / count if reduction == "mean" else loss


def _hits(product: Product, target: Tensor, ignored: Tensor) -> bool:
    """Whether a target is a cell that is something else."""
    hit = torch.zeros_like(ignored)
    if product.mask is not None:
        hit = hit | product.mask.gather(1, target[:, None])[:, 0]
    if product.diagonal != "keep":
        hit = hit | (target == torch.arange(len(target), device=target.device))
    return bool((hit & ~ignored).any())


def _losses_of_numbers(scores: Scores, columns: Columns, target: Tensor, ignored: Tensor) -> Any:
    """The same for targets among the columns of numbers, which stand before all products."""
    numbers = columns.numbers
    is_first = all(isinstance(x, Tensor) for x in scores.blocks[: -1 if len(scores.blocks) > 1 else 1])
    if numbers is None or columns.first != numbers.shape[1] or not is_first:
        return NotImplemented
    used = target.masked_fill(ignored, 0)
    if not bool(((used >= 0) & (used < numbers.shape[1])).all()):
        return NotImplemented
    others = computed(log_sum_exp, **columns.without_numbers)
    if others is NotImplemented:
        return others
    is_target = F.one_hot(used, numbers.shape[1]).bool()
    positive = numbers.gather(1, used[:, None])[:, 0].to(others.dtype)
    rest = numbers.masked_fill(is_target, -math.inf).to(others.dtype)
    sets = [others] if numbers.shape[1] == 1 else [others, *rest.unbind(1)]
    return joined_loss(positive, sets).masked_fill(ignored, 0)


def _is_index(target: Any, N: int) -> bool:
    return type(target) is Tensor and target.dtype == torch.int64 and tuple(target.shape) == (N,)


@rule(F.cross_entropy)
def cross_entropy(
    s: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    scores = known(s, Scores)
    if (
        scores is None
        or weight is not None
        or size_average is not None
        or reduce is not None
        or label_smoothing
    ):
        return NotImplemented
    if _is_index(target, scores.shape[0]):
        return _promised_loss(s, scores, target, ignore_index, reduction, casts=True)
    if target.dtype != s.dtype:
        return NotImplemented
    of_weights = sums_of_weights if reduction == "none" else total_of_weights
    sums = of_weights(scores, known(target, Pattern) or target)
    if sums is NotImplemented:
        return sums
    return like(-sums / scores.shape[0] if reduction == "mean" else -sums, s)


@rule(F.nll_loss)
def nll_loss(
    s: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    log_p = known(s, LogProbabilities)
    options_are_plain = weight is None and size_average is None and reduce is None
    if log_p is None or not options_are_plain or not _is_index(target, log_p.shape[0]):
        return NotImplemented
    return _promised_loss(s, log_p.scores, target, ignore_index, reduction, casts=False)


@rule(F.log_softmax, torch.log_softmax, T.log_softmax)
def log_softmax(s: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    scores = known(s, Scores)
    casts = dtype is not None or torch.is_autocast_enabled(s.device.type)
    return NotImplemented if scores is None or dim not in (1, -1) or casts else LogProbabilities(scores)


@rule(F.kl_div)
def kl_div(
    s: Any,
    target: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Any:
    log_p = known(s, LogProbabilities)
    if log_p is None or size_average is not None or reduce is not None or log_target or reduction == "none":
        return NotImplemented
    if target.dtype != s.dtype:
        return NotImplemented
    pattern = known(target, Pattern)
    likelihood = total_of_weights(log_p.scores, pattern or target)
    if likelihood is NotImplemented:
        return likelihood
    if pattern is None:
        entropy = torch.xlogy(target, target).sum()
    else:
        entropy = pattern.with_table(torch.xlogy(pattern.table, pattern.table)).sums().sum()
    total = entropy.to(likelihood.dtype) - likelihood
    divisor = {"sum": 1, "batchmean": log_p.shape[0], "mean": math.prod(log_p.shape)}[reduction]
    return like(total / divisor, s, False)
