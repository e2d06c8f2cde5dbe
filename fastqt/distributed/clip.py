"""CLIP's loss over the ranks of a group, of which one side's rows alone are moved.

Each rank has the scores of its own queries with all candidates: a rectangle of the score matrix, of which it
finds both directions' part. The sums of rows are then whole, those of columns are added up over the ranks, N
numbers, and one more walk gives the gradients: 8 n N D operations for n of N rows. The gradients of the
queries are whole, and the parts of the candidates' go to their ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.distributed import collectives, faults
from fastqt.distributed.exchange import Exchange, add, zeros_like
from fastqt.distributed.ring import in_dtypes_of
from fastqt.distributed.shards import Shards
from fastqt.engines import ClipComputation
from fastqt.problem import ClipProblem, ClipSide, Gradients, Needs, Rows, loss_dtype


class _Rectangle(NamedTuple):
    """The scores of this rank's queries with some candidates.

    Attributes:
        owner: the rank that these candidates belong to; None if they are all ranks', this rank's first.
        columns: (M,) their indices in the batch.
        problem: the scores.
    """

    owner: int | None
    columns: Tensor
    problem: ClipProblem


class ClipOfRanks:
    """A `ClipProblem` whose pairs lie on several ranks; see `fastqt.engines` for the functions.

    Args:
        shards: how the pairs lie on the ranks, as "rows".
        engine: what computes a rectangle.
        ring: whether one rank's candidates after the other visit; otherwise they are gathered.
    """

    def __init__(self, shards: Shards, engine: ClipComputation, ring: bool) -> None:
        self.shards, self.engine, self.ring = shards, engine, ring
        self.counts = shards.counts["rows"]
        self.first, self.N = shards.first("rows"), shards.total("rows")

    def gradients_in_forward(self, p: ClipProblem) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return True

    @faults.telling
    def forward(self, p: ClipProblem) -> Rows:
        """The loss of each pair of this rank; saved is what is known of rows and columns."""
        return self._rows(p, self._gathered(p))

    @faults.telling
    def forward_with_gradients(
        self, p: ClipProblem, row_weight: float, needs: Needs
    ) -> tuple[Tensor, Gradients]:
        """row_weight * sum_i loss_i of this rank's pairs, and the gradients of the same of all pairs."""
        gathered = self._gathered(p)
        rows = self._rows(p, gathered)
        weights = torch.full_like(rows.saved[0], row_weight)
        gradients = self._gradients(p, gathered, rows.saved, weights, needs)
        return (row_weight * rows.loss.sum()).to(loss_dtype(p.queries)), gradients

    @faults.telling
    def backward(
        self, p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs
    ) -> Gradients:
        """The gradients of sum_i row_weights_i loss_i over all ranks, from what `forward` found."""
        weights = collectives.gather_constant(row_weights, self.counts, self.shards.group)
        return self._gradients(p, self._gathered(p), saved, weights, needs)

    def _gathered(self, p: ClipProblem) -> Tensor | None:
        """The candidates of all ranks, this rank's first; None for a ring."""
        if self.ring:
            return None
        return collectives.gather_constant(p.candidates, self.counts, self.shards.group).roll(-self.first, 0)

    def _rectangles(
        self, p: ClipProblem, gathered: Tensor | None, exchange: Exchange | None
    ) -> Iterator[_Rectangle]:
        n, device = len(p.queries), p.queries.device
        options = p.scale, p.memory, p.normalize
        if exchange is None:
            assert gathered is not None
            columns = torch.arange(self.N, device=device).roll(-self.first)
            yield _Rectangle(None, columns, ClipProblem(p.queries, gathered, *options, pairs=n))
            return
        for owner, (candidates,) in exchange.visits():
            first = sum(self.counts[:owner])
            columns = torch.arange(first, first + self.counts[owner], device=device)
            pairs = n if owner == self.shards.group.rank else 0
            yield _Rectangle(owner, columns, ClipProblem(p.queries, candidates, *options, pairs=pairs))

    def _exchange(self, p: ClipProblem) -> Exchange | None:
        return Exchange(self.shards.group, [p.candidates], [self.counts]) if self.ring else None

    def _rows(self, p: ClipProblem, gathered: Tensor | None) -> Rows:
        """The losses; saved are all pairs' scores, and what else is in own rows and in all columns."""
        group, n = self.shards.group, len(p.queries)
        positive = p.queries.new_empty(n, dtype=accumulation_dtype(p.queries.device))
        of_rows = torch.full_like(positive, -torch.inf)
        of_columns = positive.new_full((self.N,), -torch.inf)
        for rectangle in self._rectangles(p, gathered, self._exchange(p)):
            found = self.engine.sums(rectangle.problem)
            of_rows = torch.logaddexp(of_rows, found.row_others)
            of_columns[rectangle.columns] = found.column_others
            if len(found.positive):
                positive = found.positive
        of_columns = collectives.log_add_up(of_columns, group)
        own = of_columns[self.first : self.first + n]
        zero = torch.zeros_like(positive)
        loss = torch.logaddexp(of_rows - positive, zero) + torch.logaddexp(own - positive, zero)
        return Rows(
            loss / 2, (collectives.gather_constant(positive, self.counts, group), of_rows, of_columns)
        )

    def _gradients(
        self,
        p: ClipProblem,
        gathered: Tensor | None,
        known: tuple[Tensor, ...],
        weights: Tensor,  # (N,) of all pairs
        needs: Needs,
    ) -> Gradients:
        positive, of_rows, of_columns = known
        own = slice(self.first, self.first + len(p.queries))
        rows = ClipSide(torch.logaddexp(of_rows, positive[own]), weights[own] / 2)
        columns = ClipSide(torch.logaddexp(of_columns, positive), weights / 2)
        # At a pair P - 1 of each direction, from what the others have: that keeps its digits for P near 1.
        others = (of_rows - rows.logsumexp).exp() + (of_columns - columns.logsumexp)[own].exp()
        of_pairs = -rows.weights * others
        if gathered is not None:
            _, places, problem = next(self._rectangles(p, gathered, None))
            side = ClipSide(columns.logsumexp[places], columns.weights[places])
            found = self.engine.gradients_from(problem, rows, side, of_pairs, needs)
            if found.candidates is None:
                return found
            parts = found.candidates.roll(self.first, 0)
            dtype = p.candidates.dtype
            own_part = collectives.sum_rows(parts, self.counts, self.shards.group, dtype)
            return found._replace(candidates=own_part)
        return self._gradients_of_ring(p, rows, columns, of_pairs, needs)

    def _gradients_of_ring(
        self, p: ClipProblem, rows: ClipSide, columns: ClipSide, of_pairs: Tensor, needs: Needs
    ) -> Gradients:
        inputs = p.inputs()
        sums = Gradients(*(zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=True)))

        def part_of(places: Tensor, problem: ClipProblem) -> Tensor | None:
            """Adds this rank's gradients, which are gone before the next visit makes others."""
            side = ClipSide(columns.logsumexp[places], columns.weights[places])
            found = self.engine.gradients_from(problem, rows, side, of_pairs[: problem.pairs], needs)
            add(((found.queries, sums.queries), (found.scale, sums.scale)))
            return found.candidates

        exchange = self._exchange(p)
        for owner, places, problem in self._rectangles(p, None, exchange):
            part = part_of(places, problem)
            if exchange is not None and owner is not None:
                exchange.send_home(owner, [part], [sums.candidates])
        if exchange is not None:
            exchange.arrived([sums.candidates])
        return in_dtypes_of(inputs, sums)
