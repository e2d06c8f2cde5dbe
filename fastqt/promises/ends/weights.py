"""The sum over each row of weights times scores or log-probabilities, also where they are a mask's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.functional import contrastive_loss
from fastqt.promises.ends.arguments import columns_of, computed, is_plain, with_rows
from fastqt.promises.ends.exponentials import logsumexp_of
from fastqt.promises.patterns import Pattern
from fastqt.promises.rules import RULES
from fastqt.promises.scores import Scores, WeightedScores
from fastqt.promises.terms import LogSumExp
from fastqt.targets.base import TargetRows, Targets

MOST_ENTRIES = 2**20  # of a list of targets


@dataclass(eq=False)
class LogLikelihoods:
    """The sum over each row of log-probabilities times weights.

    Attributes:
        scores: of whose softmax these are the logarithms.
        options: the scores as the losses take them.
        weights: (N, M), a tensor or a mask's.
        targets: the same as a loss takes them; None for weights of a mask that it does not take.
    """

    scores: Scores
    options: dict[str, Any]
    weights: Tensor | Pattern
    targets: Listed | Tensor | None

    def rows(self) -> Any:
        """Of each row, (N,); NotImplemented where cells are needed."""
        if self.targets is not None:
            divergences = self._divergence(self.targets, "none")
            if divergences is not NotImplemented:
                if isinstance(self.targets, Listed):
                    entropies = self.targets.entropies.to(divergences.dtype)
                else:
                    entropies = torch.xlogy(self.targets, self.targets).sum(1)
                return with_rows(entropies - divergences, self.scores)
        if not isinstance(self.weights, Pattern) or not _has_products(self.scores, self.weights):
            return NotImplemented
        logsumexps = logsumexp_of(self.scores)
        if logsumexps is NotImplemented:
            return logsumexps
        return _sums_of_products(self.scores.plus(-1.0, logsumexps[:, None]), self.weights)

    def total(self, factor: float | Tensor = 1.0, sign: float = 1.0) -> Any:
        """Of all rows, each times a factor, whose gradients are computed beside it.

        Args:
            factor: a number, or one of each row, (N,).
            sign: of the factors of rows.
        """
        targets: Listed | Tensor | None
        if isinstance(factor, Tensor):
            of_rows = factor if sign > 0 else -factor
            targets = self.targets.times(of_rows) if isinstance(self.targets, Listed) else None
        else:
            targets, sign = self.targets, factor
        if targets is not None:
            divergence = self._divergence(targets, "sum")
            if divergence is not NotImplemented:
                weights = targets.weights if isinstance(targets, Listed) else targets
                entropy = torch.xlogy(weights, weights).sum().to(divergence.dtype)
                return with_rows(sign * (entropy - divergence), self.scores)
        rows = self.rows()
        return rows if rows is NotImplemented else (rows * factor).sum()

    def _divergence(self, targets: Listed | Tensor, reduction: str) -> Any:
        return computed(contrastive_loss, **self.options, targets=targets, reduction=reduction)


def log_likelihoods(scores: Scores, weights: Any) -> LogLikelihoods | None:
    """What sums log-probabilities times weights; None where cells are needed."""
    columns = columns_of(scores)
    if columns is None or len(scores.blocks) > 1:
        return None
    product = columns.product
    if isinstance(weights, Pattern):
        if weights.size != scores.shape or not weights.table.is_floating_point():
            return None
        targets = listed(weights) if product.mask is None else None
        is_free = product.diagonal == "keep" or weights.is_zero_on_diagonal
        if targets is not None and not is_free and targets.has_diagonal:
            targets = None
        can = targets is not None or _has_products(scores, weights)
        return LogLikelihoods(scores, columns.options, weights, targets) if can else None

    if type(weights) is not Tensor or tuple(weights.shape) != scores.shape or weights.requires_grad:
        return None
    if not product.is_plain_but_diagonal(weights) or not bool((weights >= 0).all()):
        return None
    dense = weights.to(torch.promote_types(product.queries.dtype, torch.float32))
    return LogLikelihoods(scores, columns.options, weights, dense)


def _has_products(scores: Scores, weights: Pattern) -> bool:
    """Whether the sum over the columns can go before the product with the query."""
    return is_plain(scores) and weights.is_finite


def total_of_weights(scores: Scores, weights: Any) -> Any:
    """The sum over all rows of log-probabilities times weights."""
    likelihoods = log_likelihoods(scores, weights)
    return NotImplemented if likelihoods is None else likelihoods.total()


def sums_of_weights(scores: Scores, weights: Any) -> Any:
    """The same of each row, (N,)."""
    likelihoods = log_likelihoods(scores, weights)
    return NotImplemented if likelihoods is None else likelihoods.rows()


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

    def __init__(
        self, N: int, rows: Tensor, columns: Tensor, weights: Tensor, starts: Tensor | None = None
    ) -> None:
        if starts is None:
            starts = torch.searchsorted(rows, torch.arange(N + 1, device=rows.device))
        weights = weights.to(accumulation_dtype(weights.device))
        self._rows, self._numbers = TargetRows(starts, columns, weights), rows

    @property
    def weights(self) -> Tensor:
        return self._rows.compressed()[2]

    def times(self, factor: Tensor) -> Listed:
        """The weights of each row times a number of no less than 0, (N,)."""
        rows, (starts, columns, weights) = self._numbers, self._rows.compressed()
        return Listed(len(factor), rows, columns, weights * factor.to(weights.dtype)[rows], starts)

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


def sums_of_weighted_scores(weighted: WeightedScores) -> Tensor:
    """The sum over the columns goes before the product with the query."""
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


def log_probabilities(scores: Scores) -> Scores | None:
    """The scores of whose softmax these are the logarithm, but for cells that are not in it."""
    terms = () if scores.row is None else scores.row.terms
    if len(terms) != 1 or terms[0][0] != -1 or not isinstance(terms[0][1], LogSumExp):
        return None
    others = terms[0][1].scores
    block = others.blocks[0]
    is_one = len(scores.blocks) == len(others.blocks) == 1
    return others if is_one and scores.first.is_same(block) else None
