"""What becomes of a chunk's scores: the softmax of each row, or the sigmoid of each cell.

A link turns the scores S into E, in their own memory, and gives the row factors with which

    dL/dS_ij = factor_i E_ij,

listed targets included, whose E is found apart. It also finds the losses of the rows.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.engines.chunked.cells import ListedTargets, softplus
from fastqt.problem import Problem

# F.softplus is x itself from there on: exp(-threshold) beside it is below half a digit.
SOFTPLUS_THRESHOLD = 50
# exp(shift - logsumexp) is one over the sum of a row's exponentials, and below this only where scores are so
# large that the shift has no digit after the point.
LEAST_OF_EXPONENTIALS = 2.0**-40


class Chunk(NamedTuple):
    """Whole rows of scores.

    Attributes:
        rows: which.
        scores: (n, M + K); minus infinity at excluded cells and at listed targets.
        alone: (n,) the score of a cell that each row has alone, in the dtype of accumulation, or None.
        targets: (n, M) if they are not listed.
        spare: room for as many numbers as there are scores, if the link has asked for it.
    """

    rows: slice
    scores: Tensor
    alone: Tensor | None
    targets: Tensor | None
    spare: Tensor | None


class Factors(NamedTuple):
    """What gradients are made of beside E, in the dtype of accumulation.

    Attributes:
        of_rows: (n,) the factors of E's rows.
        alone: (n,) dL/dS of the cells that rows have alone, or None.
    """

    of_rows: Tensor
    alone: Tensor | None


class Link(Protocol):
    """A link function over whole rows of scores, of which the weights are (N,)."""

    def __init__(
        self, p: Problem, weights: Tensor, listed: ListedTargets | None, *, differentiates: bool = True
    ) -> None: ...

    logsumexp: Tensor  # (N,) in the dtype of accumulation, as the two others
    mass: Tensor
    loss: Tensor
    takes_spare: bool

    def conclude(self, chunk: Chunk) -> Factors:
        """Turns scores into E, and finds the losses of the rows."""

    def of_listed(self, entries: slice) -> Tensor:
        """E of listed targets, once their rows are concluded."""


class Softmax:
    """sum_j T_ij (log T_ij - log P_ij), or without targets the logsumexp of each row."""

    takes_spare = False

    def __init__(
        self,
        p: Problem,
        weights: Tensor,
        listed: ListedTargets | None,
        *,
        differentiates: bool = True,
        known: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """
        Args:
            known: (N,) the logsumexp and the mass of rows of which the problem has a part of the columns.
        """
        N, device = len(p.queries), p.queries.device
        self._differentiates, self._known = differentiates, known
        self._sums_alone = p.link == "log_sum_exp"
        self._weights, self._listed = weights, listed
        dtype = accumulation_dtype(device)

        # Of each row: the shift of the exponentials, and the logsumexp of all cells but listed targets.
        self._shift, self._others, self.logsumexp, self.loss = (
            torch.zeros(N, dtype=dtype, device=device) for _ in range(4)
        )
        self.mass = torch.full_like(self.loss, float(self._sums_alone))
        self._of_targets = torch.full_like(self.loss, -torch.inf)  # their logsumexp
        # The same with 0 for minus infinity, for targets whose probability is 0.
        self._near_targets = torch.zeros_like(self.loss)
        self._constant = torch.zeros_like(self.loss)
        if listed is not None and not self._sums_alone:
            self.mass = listed.row_sums(listed.weights)
            self._of_targets = listed.logsumexp()
            self._near_targets = self._of_targets.masked_fill(self._of_targets.isneginf(), 0)
            divergences = listed.weights.log() + (self._near_targets[listed.rows] - listed.scores)
            self._constant = listed.row_sums(listed.where_targets(listed.weights * divergences))

    def conclude(self, chunk: Chunk) -> Factors:
        rows, S, alone, T, _ = chunk
        if T is not None:
            self.mass[rows] = T.sum(1, dtype=self.mass.dtype)
        mass, of_targets = self.mass[rows], self._of_targets[rows]
        if self._known is not None:
            mass = self._known[1][rows]

        # A row without targets adds nothing, whatever its scores are.
        empty = mass == 0
        if self._differentiates:
            S.masked_fill_(empty[:, None], 0)
            alone = None if alone is None else alone.masked_fill(empty, 0)

        # The shift is the row's maximum: E is at most 1, and the largest of all cells has all digits.
        largest = S.amax(1)
        exact = of_targets if alone is None else torch.maximum(of_targets, alone)
        if self._known is not None:  # Other columns may be larger by far, and a factor has to be in range.
            exact = self._known[0][rows]
        largest = torch.maximum(largest, _rounded_down(exact, S.dtype))
        largest.masked_fill_(largest.isneginf(), 0)
        S.sub_(largest[:, None])

        shift = self._shift[rows] = largest.to(mass.dtype)
        divergence = None if T is None else _sum_at_targets(T, T.log() - S[:, : T.shape[1]])

        others = shift + S.exp_().sum(1).to(mass.dtype).log()
        if alone is not None:
            others = torch.logaddexp(others, alone)
        self._others[rows] = others
        logsumexp = self.logsumexp[rows] = torch.logaddexp(of_targets, others)

        if self._sums_alone:
            self.loss[rows] = logsumexp
        elif divergence is not None:
            self.loss[rows] = (divergence + mass * (logsumexp - shift)).masked_fill(empty, 0)
        else:
            # With o and x the logsumexps of others and targets, lse = x + log(1 + exp(o - x)): close to a
            # learnt target's score all digits of the difference are kept.
            distance = torch.logaddexp(others - of_targets, torch.zeros_like(others))
            self.loss[rows] = self._constant[rows] + mass * distance.masked_fill(empty, 0)

        # A probability is E times exp(shift - lse). Where every cell is excluded the logsumexp is minus
        # infinity, and there are none; beside a target they are NaN.
        if self._known is not None:
            logsumexp = self._known[0][rows].masked_fill(empty, torch.inf)
        if self._sums_alone:
            logsumexp = logsumexp.masked_fill(logsumexp.isneginf(), torch.inf)
        of_exponentials = mass * (shift - logsumexp).exp()
        weights = self._weights[rows]
        of_alone = None if alone is None else weights * mass * (alone - logsumexp).exp()
        if T is None:
            return Factors(weights * of_exponentials, of_alone)

        S.mul_(of_exponentials.to(S.dtype)[:, None])
        S[:, : T.shape[1]].sub_(T)
        return Factors(weights, of_alone)

    def of_listed(self, entries: slice) -> Tensor:
        listed = self._listed
        assert listed is not None
        row, weights = listed.rows[entries], listed.weights[entries]
        logsumexp, mass = (x[row] for x in self._known or (self.logsumexp, self.mass))

        # A target's probability is (1 - q) r, with q that of all other cells and r its share among targets.
        # So rho P - T = (rho r - T) - rho q r, of which a single target has the last term alone.
        share = (listed.scores[entries] - self._near_targets[row]).exp()
        if self._known is None:
            others = (self._others[row] - logsumexp).exp()
        else:
            others = -(self._near_targets[row] - logsumexp).expm1()
        of_scores = (mass * share - weights) - mass * others * share
        of_exponentials = (self._shift[row] - logsumexp).exp()
        return of_scores / (mass * of_exponentials.clamp(min=LEAST_OF_EXPONENTIALS))


class Sigmoid:
    """sum_j softplus(S_ij) - T_ij S_ij."""

    takes_spare = True

    def __init__(self, p: Problem, weights: Tensor, listed: ListedTargets | None, **_: object) -> None:
        """
        Args:
            _: of a softmax, which depend on other cells of a row.
        """
        self._weights, self._listed = weights, listed
        self.loss, self.logsumexp, self.mass = (torch.zeros_like(weights) for _ in range(3))
        if listed is not None:
            # log(1 + exp(S)) - T S, in which nothing large cancels out where T is 1.
            s, t = listed.scores, listed.weights
            losses = softplus(-s.abs()) + (s.relu() - t * s)
            self.loss = listed.row_sums(listed.where_targets(losses))

    def conclude(self, chunk: Chunk) -> Factors:
        rows, S, alone, T, spare = chunk
        weights, loss = self._weights[rows], self.loss[rows]
        assert spare is not None

        torch.ops.aten.softplus.out(S, 1, SOFTPLUS_THRESHOLD, out=spare)
        loss += spare.sum(1)
        if T is not None:
            loss -= _sum_at_targets(T, S[:, : T.shape[1]])
        if alone is not None:
            loss += softplus(alone)

        if T is None:
            S.sigmoid_()
        else:
            # sigmoid(S) - T = (1 - T) sigmoid(S) - T sigmoid(-S), which keeps its digits where T is 1.
            torch.neg(S, out=spare).sigmoid_()
            cells = S.sigmoid_()[:, : T.shape[1]]
            cells.mul_(1 - T).sub_(spare[:, : T.shape[1]].mul_(T))
        return Factors(weights, None if alone is None else weights * alone.sigmoid())

    def of_listed(self, entries: slice) -> Tensor:
        listed = self._listed
        assert listed is not None
        s, t = listed.scores[entries], listed.weights[entries]
        return (1 - t) * s.sigmoid() - t * (-s).sigmoid()


def _sum_at_targets(T: Tensor, values: Tensor) -> Tensor:
    """sum_j T_ij values_ij over the targets, (n,) in the dtype of accumulation."""
    return (T * values).masked_fill_(T == 0, 0).sum(1, dtype=accumulation_dtype(T.device))


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest numbers of `dtype` that are not above x, so that no probability seems larger than 1."""
    if x.dtype is dtype:
        return x
    rounded = x.to(dtype)
    below = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return below.where(rounded.to(x.dtype) > x, rounded)
