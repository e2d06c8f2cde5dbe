"""Sums and means over rows, and what is multiplied before: weights, masks and signs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt.promises import closed
from fastqt.promises.ends.arguments import is_plain, like
from fastqt.promises.ends.binary import sum_of_log_sigmoids
from fastqt.promises.ends.exponentials import logsumexp_of, sums_of_exponentials, where_one
from fastqt.promises.ends.row_sums import RowSums
from fastqt.promises.ends.weights import (
    LogLikelihoods,
    log_likelihoods,
    log_probabilities,
    sums_of_weighted_scores,
)
from fastqt.promises.patterns import Pattern
from fastqt.promises.promise import Promise, known
from fastqt.promises.rules import RULES
from fastqt.promises.scores import (
    Exponentials,
    LogProbabilities,
    LogSigmoids,
    Scores,
    Weighted,
    WeightedScores,
    replace,
)

T = Tensor
rule = RULES.rule


@rule(T.sum, torch.sum)
def summed(s: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    dim = dim[0] if isinstance(dim, tuple | list) and len(dim) == 1 else dim
    if named or dim not in (None, 1, -1):
        return NotImplemented
    if dim is None and (signed := known(s, LogSigmoids)) is not None:
        return like(sum_of_log_sigmoids(signed.of), s, False)
    if dim is not None and (exponentials := known(s, Exponentials)) is not None:
        term = sums_of_exponentials(s, exponentials.scores, keepdim)
        if term is not None:
            return term
    if (likelihoods := _likelihoods_of(s)) is not None:
        return _sums_of_likelihoods(s, *likelihoods, dim, keepdim)
    rows = _sums_of_rows(s)
    if rows is NotImplemented:
        return rows
    rows = like(rows, s, False)
    if dim is None:
        return rows.sum()
    return rows.unsqueeze(1) if keepdim else rows


@rule(T.mean, torch.mean)
def averaged(s: Any, dim: Any = None, keepdim: bool = False, **named: Any) -> Any:
    total = summed(s, dim, keepdim, **named)
    count = s.shape[1] if dim is not None else s.numel()
    if isinstance(total, RowSums):
        return replace(total, factor=total.factor / count)
    return total if total is NotImplemented else total / count


def _likelihoods_of(s: Any) -> tuple[LogLikelihoods, float] | None:
    """The sums over rows of what is log-probabilities times weights, and their sign."""
    likelihoods, sign = None, 1.0
    if (weighted := known(s, Weighted)) is not None:
        likelihoods, sign = log_likelihoods(weighted.of.scores, weighted.weights), weighted.sign
    elif (weighted := known(s, WeightedScores)) is not None:
        log_p = log_probabilities(weighted.of)
        likelihoods = None if log_p is None else log_likelihoods(log_p, weighted.weights)
    return None if likelihoods is None else (likelihoods, sign)


def _sums_of_likelihoods(
    s: Promise, likelihoods: LogLikelihoods, sign: float, dim: Any, keepdim: bool
) -> Any:
    if dim is None:
        total = likelihoods.total()
        return total if total is NotImplemented else like(sign * total, s, False)
    N = s.shape[0]
    return RowSums(size=(N, 1) if keepdim else (N,), dtype=s.dtype, of=likelihoods, factor=sign)


def _sums_of_rows(s: Any) -> Any:
    """The sum of each row of what follows from scores, (N,)."""
    if (exponentials := known(s, Exponentials)) is not None:
        sums = logsumexp_of(exponentials.scores)
        return sums if sums is NotImplemented else sums.exp()
    if (weighted := known(s, WeightedScores)) is not None:
        return sums_of_weighted_scores(weighted)
    return NotImplemented


def _times(s: Any, x: Any) -> Any:
    """Log-probabilities times weights, or exponentials times ones and zeros."""
    s, x = (s, x) if isinstance(s, Promise) else (x, s)
    if (weighted := known(s, Weighted)) is not None and type(x) in (int, float) and x == -1:
        return Weighted(weighted.weights, weighted.of, -weighted.sign)
    if (pattern := known(x, Pattern) or known(s, Pattern)) is not None:
        return _times_pattern(s if known(x, Pattern) is not None else x, pattern)
    if type(x) is not Tensor or tuple(x.shape) != tuple(s.shape) or x.requires_grad:
        return closed.multiplied(s, x)
    if (log_p := known(s, LogProbabilities)) is not None and x.dtype in (s.dtype, torch.bool):
        return Weighted(x.to(s.dtype), log_p)
    if (exponentials := known(s, Exponentials)) is not None and bool(((x == 0) | (x == 1)).all()):
        return where_one(exponentials.scores, x) if x.dtype in (s.dtype, torch.bool) else NotImplemented
    if (scores := known(s, Scores)) is not None and x.dtype == s.dtype and is_plain(scores):
        return WeightedScores(x, scores)
    return closed.multiplied(s, x)


def _times_pattern(s: Any, pattern: Pattern) -> Any:
    """The same with a mask that is promised."""
    if not isinstance(s, Promise) or pattern.size != tuple(s.shape):
        return NotImplemented
    if torch.promote_types(pattern.table.dtype, s.dtype) != s.dtype:
        return NotImplemented
    if not pattern.is_finite:
        return NotImplemented

    weights = pattern.with_table(pattern.table.to(s.dtype))
    if (log_p := known(s, LogProbabilities)) is not None:
        return Weighted(weights, log_p)
    if (exponentials := known(s, Exponentials)) is not None:
        p = exponentials.scores.first
        if len(exponentials.scores.blocks) == 1 and p.is_plain and weights.is_of_diagonal(1, 0):
            masked = replace(p, diagonal="exclude")
            if weights.size[0] > 1:
                return Exponentials(replace(exponentials.scores, blocks=(masked,)))
        is_of_ones = set(weights.values) <= {0, 1}
        return where_one(exponentials.scores, weights.cells()) if is_of_ones else NotImplemented
    if (scores := known(s, Scores)) is not None and is_plain(scores):
        return WeightedScores(weights, scores)
    return NotImplemented


RULES.rule(T.mul, torch.mul, T.__mul__, T.__rmul__, T.multiply, torch.multiply)(_times)


def _minus(s: Any) -> Any:
    return _times(s, -1) if known(s, Weighted) is not None else closed.negated(s)


RULES.rule(T.neg, torch.neg, T.__neg__, T.negative, torch.negative)(_minus)
