"""The sum over each row of weights times scores or log-probabilities, also where they are a mask's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.functional import contrastive_loss
from fastqt.promises.ends.arguments import Columns, columns_of, computed, is_plain, with_rows
from fastqt.promises.ends.exponentials import logsumexp_of
from fastqt.promises.patterns import Pattern
from fastqt.promises.rules import RULES
from fastqt.promises.scores import Scores, WeightedScores
from fastqt.promises.terms import LogSumExp
from fastqt.targets.base import TargetRows, Targets

MOST_ENTRIES = 2**20  # of a list of targets


def sums_of_weights(scores: Scores, weights: Any) -> Any:
    """The sum of each row of weights times log-probabilities, (N,)."""
    columns = columns_of(scores)
    if columns is not None and isinstance(weights, Pattern):
        return _sums_of_pattern(scores, columns, weights)
    if columns is None or type(weights) is not Tensor or tuple(weights.shape) != scores.shape:
        return NotImplemented
    if len(scores.blocks) > 1 or weights.requires_grad or not columns.product.is_plain_but_diagonal(weights):
        return NotImplemented
    dense = weights.to(torch.promote_types(columns.product.queries.dtype, torch.float32))
    if not bool((dense >= 0).all()):
        return NotImplemented
    divergence = computed(contrastive_loss, **columns.options, targets=dense, reduction="none")
    if divergence is NotImplemented:
        return divergence
    return with_rows(torch.xlogy(dense, dense).sum(1) - divergence, scores)


def _sums_of_pattern(scores: Scores, columns: Columns, weights: Pattern) -> Any:
    """The same of weights that are equal in many cells."""
    if weights.size != scores.shape or len(scores.blocks) > 1 or not weights.table.is_floating_point():
        return NotImplemented
    product, targets = columns.product, listed(weights)
    is_kept = product.diagonal == "keep" or (targets is not None and not targets.has_diagonal)
    if targets is not None and product.mask is None and is_kept:
        divergence = computed(contrastive_loss, **columns.options, targets=targets, reduction="none")
        if divergence is not NotImplemented:
            return with_rows(targets.entropies.to(divergence.dtype) - divergence, scores)
    if not is_plain(scores) or not weights.is_finite:
        return NotImplemented
    logsumexps = logsumexp_of(scores)
    if logsumexps is NotImplemented:
        return logsumexps
    return _sums_of_products(scores.plus(-1.0, logsumexps[:, None]), weights)


def listed(weights: Pattern) -> Listed | None:
    """The weights by their list; None where it is long, or one of them is less than 0."""
    cells = weights.entries(MOST_ENTRIES)
    if cells is None or len(cells[0]) > MOST_ENTRIES:
        return None
    # Cases of the table that are below 0 may be those of no cell.
    if min(weights.values) < 0 and not bool((cells[2] >= 0).all()):
        return None
    return Listed(weights.size[0], *cells)


class Listed(Targets):
    """Weights of cells (rows[i], columns[i]), in the order of the rows."""

    def __init__(self, N: int, rows: Tensor, columns: Tensor, weights: Tensor) -> None:
        counts = torch.bincount(rows, minlength=N)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        weights = weights.to(accumulation_dtype(weights.device))
        self._rows, self._numbers = TargetRows(starts, columns, weights), rows

    @property
    def has_diagonal(self) -> bool:
        """Whether a cell (i, i) is among them."""
        _, columns, _ = self._rows.compressed()
        return bool((self._numbers == columns).any())

    @property
    def entropies(self) -> Tensor:
        """The sum of each row of w log w, (N,)."""
        starts, _, weights = self._rows.compressed()
        entropies = torch.xlogy(weights, weights)
        return weights.new_zeros(len(starts) - 1).index_add_(0, self._numbers, entropies)

    def check(self, N: int, M: int, diagonal: str) -> None:
        return  # They are of a matrix of this shape.

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        return self._rows


def sums_of_weighted_scores(weighted: WeightedScores) -> Any:
    """The sum over the columns goes before the product with the query."""
    log_p = _log_probabilities(weighted.of)
    sums = NotImplemented if log_p is None else sums_of_weights(log_p, weighted.weights)
    if sums is not NotImplemented:
        return sums

    RULES.taken = "a product with the weighted sums of candidates"
    return _sums_of_products(weighted.of, weighted.weights)


def _sums_of_products(scores: Scores, weights: Tensor | Pattern) -> Tensor:
    """The sum of each row of weights times scores of one product, (N,)."""
    p, row = scores.first.of_rows(), scores.row
    times: Callable[[Tensor], Tensor]
    if isinstance(weights, Pattern):
        dtype = torch.promote_types(weights.table.dtype, torch.float32)
        times, of_rows = weights.times, weights.sums().to(dtype)
    else:
        dtype = torch.promote_types(weights.dtype, torch.float32)
        dense = weights.to(dtype)
        times, of_rows = dense.__matmul__, dense.sum(1)

    sums: Tensor = (p.queries.to(dtype) * times(p.candidates.to(dtype))).sum(1) * p.scale
    if isinstance(p.bias, Tensor) and p.bias.dim():
        sums = sums + times(p.bias.to(dtype)[:, None])[:, 0]
    elif not p.has_no_bias:
        sums = sums + of_rows * p.bias
    return sums if row is None else sums + of_rows * row.computed()[:, 0]


def _log_probabilities(scores: Scores) -> Scores | None:
    """The scores of whose softmax these are the logarithm, but for cells that are not in it."""
    terms = () if scores.row is None else scores.row.terms
    if len(terms) != 1 or terms[0][0] != -1 or not isinstance(terms[0][1], LogSumExp):
        return None
    others = terms[0][1].scores
    block = others.blocks[0]
    is_one = len(scores.blocks) == len(others.blocks) == 1
    return others if is_one and scores.first.is_same(block) else None
