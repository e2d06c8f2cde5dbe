"""Losses of pairs that are given as lists, as a miner gives them, without a matrix of scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_backward

CHUNK_BYTES = 24 * 2**20  # of rows that are multiplied at a time


def ntxent_of_pairs(
    scores: Tensor,  # (P,)
    anchors: Tensor,  # (P,) the row of each pair
    others: Tensor,  # (N,) the logsumexp of each row's negatives; -inf where there are none
) -> Tensor:
    """NT-Xent's loss of each pair, (P,)."""
    return F.softplus(others[anchors] - scores, threshold=50)


def supcon_of_pairs(
    positive_scores: Tensor,  # (P,)
    anchors: Tensor,  # (P,)
    others: Tensor,  # (N,) as above
) -> Tensor:
    """SupCon's loss of each row, (N,); 0 where it has no pair."""
    counts = torch.zeros_like(others).index_add(0, anchors, torch.ones_like(positive_scores))
    most = logsumexp_by_row(positive_scores, anchors, len(others))
    having = counts > 0
    most = most.where(having, 0)
    mean = torch.zeros_like(others).index_add(0, anchors, positive_scores) / counts.clamp(min=1)
    return ((most - mean) + F.softplus(others - most, threshold=50)).where(having, 0)


def logsumexp_by_row(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """The logsumexp of the values (P,) of each of `count` rows; -inf for those that have none."""
    most = torch.full((count,), -torch.inf, dtype=values.dtype, device=values.device)
    most = most.scatter_reduce(0, rows, values.detach(), "amax")
    shift = most.where(most.isfinite(), 0)
    sums = torch.zeros_like(most).index_add(0, rows, (values - shift[rows]).exp())
    having = sums != 0
    return torch.where(having, sums.where(having, 1).log() + shift, -torch.inf)


def distinct(rows: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Pairs without those that come a second time, which a mask of a matrix would hold once."""
    cells = (rows * width + columns).unique()
    return cells // width, cells % width


class _ScoresOfPairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, rows, columns)
        scores = x.new_empty(len(rows))
        for chunk in _chunks(x, len(rows)):
            torch.sum(x[rows[chunk]] * y[columns[chunk]], 1, out=scores[chunk])
        return scores

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("fastqt.integrations.metric_learning")
        x, y, rows, columns = ctx.saved_tensors

        of_x = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        of_y = torch.zeros_like(y) if ctx.needs_input_grad[1] else None

        for chunk in _chunks(x, len(rows)):
            a, b, weights = rows[chunk], columns[chunk], upstream[0][chunk, None]
            if of_x is not None:
                of_x.index_add_(0, a, y[b] * weights)
            if of_y is not None:
                of_y.index_add_(0, b, x[a] * weights)
        return of_x, of_y, None, None


def _chunks(x: Tensor, count: int) -> Iterator[slice]:
    step = max(CHUNK_BYTES // (3 * x.shape[1] * x.element_size()), 1)
    return (slice(begin, begin + step) for begin in range(0, count, step))


# The inner products (P,) of rows x (N, D) and y (M, D) at indices (P,) each; torch gives `apply` no types.
scores_of_pairs: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = _ScoresOfPairs.apply
