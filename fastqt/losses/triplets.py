"""Triplet losses of a batch with labels, from the distances of some of its rows at a time.

An anchor's positives are the other rows of its label, and its negatives those of other labels. A rule says
which triplets of an anchor, a positive and a negative are added up: `hardest`, `semi_hard` or `all_active`.
No list of all triplets is made: `semi_hard` searches an anchor's negatives, sorted, for each positive, and
`all_active` searches its positives, which are fewer, for each negative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_backward
from fastqt.devices import accumulation_dtype
from fastqt.engines.own_products import multiply, product
from fastqt.losses.scored import slices
from fastqt.problem import loss_dtype, unit_rows
from fastqt.torch_modes import without_autocast

DISTANCES_AT_ONCE = 2**19  # 2 MiB of float32; what is computed from them takes several times as much
# A squared distance below this share of the two squared norms is computed again, from the rows' difference.
NEAR = 2**-6
# Where fewer of the distances have a gradient, differences of rows take less time than products of matrices.
FEW = 1 / 64


class Anchors(NamedTuple):
    """Some rows of a batch, and their distances from all N rows."""

    distances: Tensor  # (n, N)
    same: Tensor  # (n, N) bool: the rows of an anchor's label, itself among them
    positives: Tensor  # (n, K) int64: the other rows of its label
    taken: Tensor  # (n, K) bool: whether it has so many


class OfRule(NamedTuple):
    """What a rule makes of some anchors."""

    total: Tensor  # () the sum of the losses of triplets
    terms: Tensor  # () of how many losses the mean is taken
    d_distances: Tensor  # (n, N) the derivatives of the sum by the distances


# Of a margin, None for a soft one, and some anchors.
Rule = Callable[[float | None, Anchors], OfRule]


def triplet_loss(
    embeddings: Tensor,  # (N, D)
    labels: Tensor,  # (N,)
    rule: Rule,
    *,
    margin: float | None,
    euclidean: bool,
) -> Tensor:
    """The mean loss of the triplets of a rule, a scalar; float64 for float64, float32 otherwise.

    Args:
        margin: by how much a negative is to be farther from the anchor than the positive. With None `hardest`
            has the softplus of the difference in place of a hinge.
        euclidean: the distance is Euclidean, otherwise 1 - cosine.
    """
    rows = embeddings.to(loss_dtype(embeddings))
    with without_autocast(rows):
        rows = rows if euclidean else unit_rows(rows)
        return _triplet_loss(rows, labels, rule, margin, euclidean)


def hardest(margin: float | None, anchors: Anchors) -> OfRule:
    """Each anchor's farthest positive and its nearest negative.

    An anchor without a positive has 0 for the first distance; one without a negative has its distance from
    the farthest of all rows for the second.
    """
    distances, same, positives, taken = anchors
    farthest, place = distances.gather(1, positives).masked_fill(~taken, 0).max(1, keepdim=True)
    positive = positives.gather(1, place)
    nearest, negative = distances.masked_fill(same, torch.inf).min(1, keepdim=True)
    farthest_of_all, last = distances.max(1, keepdim=True)
    has_negative = nearest < torch.inf
    nearest = torch.where(has_negative, nearest, farthest_of_all)
    negative = torch.where(has_negative, negative, last)

    if margin is None:
        losses = F.softplus(farthest - nearest)
        weights = (farthest - nearest).sigmoid()
    else:
        excess = farthest - nearest + margin
        losses, weights = excess.relu(), (excess > 0).to(excess.dtype)
    d_distances = torch.zeros_like(distances)
    d_distances.scatter_add_(1, positive, weights)
    d_distances.scatter_add_(1, negative, -weights)
    return OfRule(_sum(losses), _sum(torch.ones_like(losses)), d_distances)


def semi_hard(margin: float | None, anchors: Anchors) -> OfRule:
    """For each positive the nearest negative that is farther than it, or the farthest negative where none is.

    An anchor without a negative has its distance from the nearest of all rows in place of the negative's.
    """
    assert margin is not None
    distances, same, positives, taken = anchors
    of_positives = distances.gather(1, positives)
    in_order, order = distances.masked_fill(same, torch.inf).sort(1)
    counts = (~same).sum(1, keepdim=True)
    place = torch.searchsorted(in_order, of_positives, right=True)
    place = torch.minimum(place, counts - 1).clamp_(min=0)
    negatives = torch.where(counts > 0, in_order.gather(1, place), distances.amin(1, keepdim=True))

    excess = of_positives - negatives + margin
    losses = excess.relu() * taken
    # Half of the gradient where the loss is exactly 0, as that of a maximum of two equal numbers.
    weights = excess.heaviside(excess.new_tensor(0.5)) * taken
    d_distances = torch.zeros_like(distances)
    d_distances.scatter_add_(1, positives, weights)
    d_distances.scatter_add_(1, order.gather(1, place), -weights * (counts > 0))
    return OfRule(_sum(losses), _sum(taken), d_distances)


def all_active(margin: float | None, anchors: Anchors) -> OfRule:
    """Each positive with each negative that is not farther than it by the margin."""
    assert margin is not None
    distances, same, positives, taken = anchors
    limits = (distances.gather(1, positives) + margin).masked_fill_(~taken, torch.inf)
    limits, order = limits.sort(1)
    # A negative has a triplet with each positive whose limit is beyond it, those of the last places.
    places = torch.searchsorted(limits, distances, right=True)
    positives_of_anchor = taken.sum(1, keepdim=True)
    uses = (positives_of_anchor - places).masked_fill_(same, 0).to(distances.dtype)
    places.masked_fill_(same, limits.shape[1])
    counts = _counts(places, limits.shape[1] + 1)[:, :-1].cumsum(1)
    counts.masked_fill_(limits.isinf(), 0)

    wide = accumulation_dtype(distances.device)
    of_positives = (counts * limits.masked_fill(limits.isinf(), 0).to(wide)).sum()
    total = of_positives - _sum(uses * distances)
    d_distances = uses.neg_()
    d_distances.scatter_add_(1, positives.gather(1, order), counts.to(distances.dtype))
    return OfRule(total, _sum(counts), d_distances)


def _counts(numbers: Tensor, size: int) -> Tensor:
    """How often each row of numbers (n, N) has each of 0 to size - 1, (n, size) int64."""
    firsts = size * torch.arange(len(numbers), device=numbers.device)
    return (numbers + firsts[:, None]).flatten().bincount(minlength=size * len(numbers)).view(-1, size)


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=accumulation_dtype(x.device))


@dataclass
class _Labelled:
    """The rows of each label, one label's after the other's."""

    labels: Tensor  # (N,) int64, numbered from 0
    order: Tensor  # (N,) the rows in the order of their labels
    starts: Tensor  # (labels,) where those of a label begin in the order
    counts: Tensor  # (labels,) how many there are
    most: int

    @classmethod
    def of(cls, labels: Tensor) -> _Labelled:
        _, numbers, counts = labels.unique(return_inverse=True, return_counts=True)
        most = int(counts.max()) if len(counts) else 0
        return cls(numbers, numbers.argsort(stable=True), counts.cumsum(0) - counts, counts, most)

    def anchors(self, block: slice, distances: Tensor) -> Anchors:
        label = self.labels[block]
        places = torch.arange(self.most, device=label.device)
        taken = places < self.counts[label, None]
        places = (self.starts[label, None] + places).clamp_(max=len(self.labels) - 1)
        positives = self.order[places]
        rows = torch.arange(block.start, block.stop, device=label.device)
        return Anchors(
            distances, label[:, None] == self.labels, positives, taken & (positives != rows[:, None])
        )


class _Distances:
    """The distances between rows of a batch: Euclidean, or of unit rows half of their squares, 1 - cosine."""

    def __init__(self, rows: Tensor, euclidean: bool) -> None:
        self.euclidean = euclidean
        # Of rows that share a large part nearly all distances would be near, and computed again.
        self.rows = rows - rows.mean(0) if euclidean else rows
        self.squares = self.rows.square().sum(1)
        # A row of zeros has no direction: its cosine is 0 and its squared distance from a unit row 1.
        self.missing = 0.5 * (self.squares == 0).to(rows.dtype)
        self.own_weights = torch.zeros_like(self.squares)

    def of(self, block: slice) -> Tensor:
        """Those of some rows from all rows, (n, N)."""
        rows, squares = self.rows[block], self.squares[block, None]
        distances = product(rows, self.rows.T).mul_(-2).add_(squares).add_(self.squares)
        self.near = distances < NEAR * (squares + self.squares)
        self.near.diagonal(block.start).fill_(False)
        for i, j, difference in self._differences(block, self.near):
            distances[i, j] = difference.square().sum(1)
        distances.diagonal(block.start).fill_(0)
        distances.clamp_(min=0)
        if self.euclidean:
            return distances.sqrt_()
        return distances.mul_(0.5).add_(self.missing[block, None]).add_(self.missing)

    def add_gradients(self, gradients: Tensor, block: slice, distances: Tensor, d_distances: Tensor) -> None:
        """Adds to those of all rows, (N, D), from the derivatives by the distances that were found last.

        Of what a row gets from products, the part along itself is left to `own_weights`.
        """
        # The derivative of a distance by a row is (x - y) / |x - y|, or x - y; it is 0 where they are equal.
        weights = d_distances
        if self.euclidean:
            weights = d_distances.div_(distances).masked_fill_(distances == 0, 0)
        apart = weights != 0
        is_few = int(apart.sum()) < FEW * apart.numel()
        if not is_few:
            apart &= self.near
        for i, j, difference in self._differences(block, apart):
            weighted = difference.mul_(weights[i, j, None])
            gradients.index_add_(0, i + block.start, weighted)
            gradients.index_add_(0, j, weighted, alpha=-1)
        if is_few:
            return

        weights = weights.masked_fill_(apart, 0)
        self.own_weights[block] += weights.sum(1)
        self.own_weights += weights.sum(0)
        weights.neg_()
        multiply(gradients[block], weights, self.rows, add=True)
        multiply(gradients, weights.T, self.rows[block], add=True)

    def _differences(self, block: slice, cells: Tensor) -> Any:
        """Rows and columns of the cells that are set, and the differences of these rows, some at a time."""
        places = cells.nonzero()
        for part in slices(len(places), max(DISTANCES_AT_ONCE // self.rows.shape[1], 1)):
            i, j = places[part].unbind(1)
            yield i, j, self.rows[block][i] - self.rows[j]


class _TripletLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, labels: Tensor, rule: Rule, margin: float | None, euclidean: bool
    ) -> Tensor:
        distances, labelled = _Distances(rows, euclidean), _Labelled.of(labels)
        gradients = torch.zeros_like(rows) if ctx.needs_input_grad[0] else None
        total = terms = rows.new_zeros((), dtype=accumulation_dtype(rows.device))
        for block in slices(len(rows), max(DISTANCES_AT_ONCE // max(len(rows), 1), 1)):
            of_block = distances.of(block)
            of_rule = rule(margin, labelled.anchors(block, of_block))
            total, terms = total + of_rule.total, terms + of_rule.terms
            if gradients is not None:
                distances.add_gradients(gradients, block, of_block, of_rule.d_distances)
        terms = terms.clamp(min=1)
        if gradients is not None:
            gradients.addcmul_(distances.own_weights[:, None], distances.rows)
            ctx.save_for_backward(gradients.div_(terms))
        return (total / terms).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("triplet_loss", *upstream)
        (gradients,) = ctx.saved_tensors
        return gradients * upstream[0], None, None, None, None


_triplet_loss: Callable[..., Tensor] = _TripletLoss.apply  # torch gives `apply` no types
