"""CLIP's loss in torch operations: a walk for the logsumexp of rows and columns, and one for the gradients.

Both walk over chunks of whole rows of the scores. The first adds up the exponentials in each row, and in
each column over the chunks. After it dL/dS of a cell depends on no other cell, and the second walk makes it
and its two products: 8 N M D operations, less the scores of the first walk's last chunk, with which the
second begins. The pairs are left out of the sums, and their dL/dS is given, so that it keeps its digits once
a pair is learnt.

Each score is made twice unless all are kept. What it adds to its query's gradient is divided by the sum of
its column, which is known once all queries have been visited, and as each column has a sum of its own, no
factor of the query's gradient could make up for it later. So problems of one chunk alone take 6 N M D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.engines.chunked.embeddings import Embeddings, ranges
from fastqt.engines.chunked.rounded import ROUNDED, Rounded, rounded_bytes, score
from fastqt.engines.chunked.walk import chunk_rows, scale_on
from fastqt.engines.products import multiply
from fastqt.engines.reference import clip as reference_clip
from fastqt.problem import (
    ClipProblem,
    ClipSide,
    ClipSums,
    Gradients,
    Inputs,
    Needs,
    Rows,
    loss_dtype,
    positive_scores,
)
from fastqt.torch_modes import without_autocast


def gradients_in_forward(p: ClipProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: ClipProblem) -> Rows:
    """The loss of each pair; saved are its score and the logsumexps of the others, as of `sums`."""
    known = sums(p)
    return Rows(_losses(known), tuple(known))


def forward_with_gradients(p: ClipProblem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    with torch.no_grad(), without_autocast(p.queries):
        walk = _Walk(p, needs)
        known = walk.sums()
        total = (row_weight * _losses(known).sum()).to(loss_dtype(p.queries))
        return total, walk.gradients(*_sides(known, torch.full_like(known.row_others, row_weight)))


def backward(p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    return gradients_from(p, *_sides(ClipSums(*saved), row_weights), needs)


def sums(p: ClipProblem) -> ClipSums:
    """The score of each pair of a rectangle, and the logsumexps of all other cells."""
    if not p.has_cells:
        return reference_clip.sums(p)
    with torch.no_grad(), without_autocast(p.queries):
        return _Walk(p, Needs()).sums()


def gradients_from(
    p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
) -> Gradients:
    """The gradients of a rectangle, of which dL/dS is `pairs` at the pairs and the sides' elsewhere."""
    if not p.has_cells:
        return reference_clip.gradients_from(p, rows, columns, pairs, needs)
    with torch.no_grad(), without_autocast(p.queries):
        return _Walk(p, needs).gradients(rows, columns, pairs)


def _losses(known: ClipSums) -> Tensor:
    """The mean of both directions' losses of each pair."""
    zero = torch.zeros_like(known.positive)
    of_rows = torch.logaddexp(known.row_others - known.positive, zero)
    return (of_rows + torch.logaddexp(known.column_others - known.positive, zero)) / 2


def _sides(known: ClipSums, weights: Tensor) -> tuple[ClipSide, ClipSide, Tensor]:
    """The softmaxes of the sum of weights_i loss_i, and its dL/dS at the pairs."""
    positive, halves = known.positive, weights / 2
    rows, columns = (
        ClipSide(torch.logaddexp(others, positive), halves)
        for others in (known.row_others, known.column_others)
    )
    # P - 1 of a pair is minus what all others have.
    of_others = (known.row_others - rows.logsumexp).exp() + (known.column_others - columns.logsumexp).exp()
    return rows, columns, -halves * of_others


class _Walk:
    """A rectangle of scores, and the gradients that are needed of it."""

    def __init__(self, p: ClipProblem, needs: Needs) -> None:
        self.p, self.needs = p, needs
        self.pairs = len(p.queries) if p.pairs is None else p.pairs
        self.dtype, self.scale = accumulation_dtype(p.queries.device), scale_on(p.queries.device, p.scale)
        self.queries = Embeddings(p.queries, p.normalize, wanted=False)
        self.candidates = Embeddings(p.candidates, p.normalize, needs.candidates)

        N, M = len(p.queries), len(p.candidates)
        dtype = loss_dtype(p.queries)
        row_bytes = (2 * M + 3 * p.queries.shape[1]) * dtype.itemsize + rounded_bytes(p.queries, M)
        self.height = chunk_rows(N, p.memory, p.queries.device, row_bytes)
        # Scores, and room for their exponentials.
        tiles: Tensor = p.queries.new_empty((2, self.height, M), dtype=dtype)
        self._scores, self._room = tiles[0], tiles[1]
        self._held: slice | None = None  # the rows whose scores the first walk has left there

    def sums(self) -> ClipSums:
        """The first walk."""
        p, N, M = self.p, len(self.p.queries), len(self.p.candidates)
        positive = p.queries.new_empty(self.pairs, dtype=self.dtype)
        row_others = p.queries.new_empty(N, dtype=self.dtype)
        column_others = p.queries.new_full((M,), -torch.inf, dtype=self.dtype)

        for rows in ranges(N, self.height):
            f = self.queries.rows(rows)
            S = self._scored(rows, f * self.scale)

            of_pairs = self._pairs_of(S, rows)
            if len(of_pairs):
                paired = slice(rows.start, rows.start + len(of_pairs))
                g = self.candidates.rows(paired)
                positive[paired] = (f[: len(g)] * g).sum(1, dtype=self.dtype) * self.scale
                of_pairs.fill_(-torch.inf)

            row_others[rows] = self._logsumexp(S, 1)
            column_others = torch.logaddexp(column_others, self._logsumexp(S, 0))
            self._held = rows
        return ClipSums(positive_scores(positive), row_others, column_others)

    def gradients(self, rows: ClipSide, columns: ClipSide, pairs: Tensor) -> Gradients:
        """The second walk, of known sums."""
        p, queries, candidates = self.p, self.queries, self.candidates
        row_shifts, row_weights = self._shifted(rows)
        column_shifts, column_weights = self._shifted(columns)
        of_scale = torch.zeros((), dtype=self.dtype, device=p.queries.device)
        gradient = p.queries.new_empty(p.queries.shape) if self.needs.queries else None
        rounded = None
        if p.queries.dtype in ROUNDED:
            largest = rows.weights.abs().amax() + columns.weights.abs().amax()
            rounded = Rounded(queries, self.scale, largest, None, self._room.numel())

        for chunk in reversed([*ranges(len(p.queries), self.height)]):
            f = queries.rows(chunk)
            scaled = f * self.scale
            S = self._scored(chunk, scaled)

            dS = torch.sub(S, column_shifts, out=self._room[: len(f)]).exp_().mul_(column_weights)
            dS.addcmul_(S.sub_(row_shifts[chunk, None]).exp_(), row_weights[chunk, None])
            of_pairs = self._pairs_of(dS, chunk)
            of_pairs.copy_(pairs[chunk.start : chunk.start + len(of_pairs)])

            if candidates.inverse_norms is not None:
                dS.mul_(candidates.inverse_norms)
            missing = None
            if rounded is not None:
                dS, scaled, missing = rounded.of_chunk(chunk, dS, torch.ones_like(rows.weights[chunk]))
            if candidates.gradient is not None:
                multiply(candidates.gradient, dS.T, scaled, add=True)
            if gradient is None and not self.needs.scale:
                continue
            product = torch.empty_like(f)
            multiply(product, dS, candidates.matrix, add=False)
            if missing is not None:
                product.mul_(missing[:, None])
            if self.needs.scale:
                of_scale += (product * f).sum(1, dtype=self.dtype).sum()
            if gradient is not None:
                gradient[chunk] = queries.through_norms(chunk, product.mul_(self.scale))

        of_candidates = candidates.finished(None if rounded is None else rounded.of_columns)
        return Inputs(gradient, of_candidates, scale=of_scale if self.needs.scale else None)

    def _scored(self, rows: slice, scaled: Tensor) -> Tensor:
        """The scores of some rows, minus infinity at the pairs where the first walk has left them."""
        S = self._scores[: len(scaled)]
        if rows != self._held:
            score(S, rows, scaled, self.queries, self.candidates, self.scale)
        return S

    def _pairs_of(self, cells: Tensor, rows: slice) -> Tensor:
        """A view of those of some rows' cells that are pairs."""
        return cells[: max(self.pairs - rows.start, 0)].diagonal(rows.start)

    def _logsumexp(self, S: Tensor, dim: int) -> Tensor:
        """Over the rows or columns of some scores, in the dtype of accumulation."""
        shift = S.amax(dim, keepdim=True)
        shift.masked_fill_(shift.isneginf(), 0)
        sums = torch.sub(S, shift, out=self._room[: len(S)]).exp_().sum(dim)
        return shift.squeeze(dim).to(self.dtype) + sums.to(self.dtype).log()

    def _shifted(self, side: ClipSide) -> tuple[Tensor, Tensor]:
        """Shifts in the scores' dtype, and weights to which is given back what rounding took from them."""
        shifts = side.logsumexp.to(self._scores.dtype)
        # Scores whose logsumexp has no digit after the point have none to give back.
        rounding = (shifts - side.logsumexp).exp().clamp(0.5, 2)
        return shifts, (side.weights * rounding).to(shifts.dtype)
