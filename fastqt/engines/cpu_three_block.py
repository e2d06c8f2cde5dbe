"""MixCSE's three blocks of scores on a CPU: plain torch operations on a chunk of rows at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastqt.problem import Rows, ThreeBlockGradients, ThreeBlockNeeds, ThreeBlockProblem, finite_scale

CHUNK_BYTES = 8 * 2**20  # of each of about eight matrices of scores
MIN_ROWS = 64


def gradients_in_forward(p: ThreeBlockProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: ThreeBlockProblem) -> Rows:
    """The loss of each row."""
    return Rows(_Walk(p, None, ThreeBlockNeeds()).run(), ())


def forward_with_gradients(
    p: ThreeBlockProblem, row_weight: float, needs: ThreeBlockNeeds
) -> tuple[Tensor, ThreeBlockGradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    weights = p.queries.new_full((len(p.queries),), row_weight, dtype=torch.float64)
    walk = _Walk(p, weights, needs)
    return (row_weight * walk.run().sum()).to(p.queries.dtype), walk.gradients


def backward(
    p: ThreeBlockProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: ThreeBlockNeeds
) -> ThreeBlockGradients:
    """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
    walk = _Walk(p, row_weights, needs)
    walk.run()
    return walk.gradients


class _Walk:
    """One pass over chunks of rows, which finds the losses and with weights adds up the gradients."""

    def __init__(self, p: ThreeBlockProblem, weights: Tensor | None, needs: ThreeBlockNeeds) -> None:
        self.p, self.weights, self.scale = p, weights, finite_scale(p.scale)
        self.u, self.v = p.queries, p.candidates
        self.gradients = ThreeBlockGradients(
            *[
                torch.zeros_like(x) if need and x is not None else None
                for x, need in zip(p.inputs(), needs, strict=True)
            ]
        )

    def run(self) -> Tensor:
        """The losses of all rows, (N,) float64."""
        N = len(self.u)
        losses = self.u.new_empty(N, dtype=torch.float64)
        step = max(CHUNK_BYTES // (N * self.u.element_size()), MIN_ROWS)
        for begin in range(0, N, step):
            chunk = slice(begin, min(begin + step, N))
            losses[chunk] = self._visit(chunk)
        return losses

    def _visit(self, chunk: slice) -> Tensor:
        """The losses of a chunk of rows; adds what they give to the gradients."""
        N = len(self.u)
        neighbours = torch.arange(chunk.start - 1, chunk.stop + 1, device=self.u.device).remainder(N)
        cosines = self.u[neighbours] @ self.v.T
        # The row above the chunk has had its loss already, but its mixture contains the chunk's first row.
        row, at = neighbours[:-1], torch.arange(len(neighbours) - 1, device=self.u.device)
        blocks, masked = self._blocks(cosines, row)
        scores = [self.scale * block for block in blocks]
        for block, column in zip(scores[1:], masked, strict=True):
            block[at, row] += self.p.own_mixture_weight
            block[at, column] = -math.inf if self.p.masks_excluded else 0.0
        positive = scores[0][at, row]
        largest = torch.stack([block.amax(1) for block in scores]).amax(0)
        E = [block.sub_(largest[:, None]).exp_() for block in scores]
        E[0][at, row] = 0
        others = torch.stack([block.sum(1, dtype=torch.float64) for block in E]).sum(0)
        gap = (positive - largest).double()
        if self.weights is not None:
            factor = self.weights[row] / (gap.exp() + others)
            for block, column in zip(E[1:], masked, strict=True):
                block[at, column] = 0
            dS = [block.mul_(factor.to(block.dtype)[:, None]) for block in E]
            dS[0][at, row] = (-others * factor).to(dS[0].dtype)
            self._differentiate(dS, blocks, cosines, row, chunk)
        # This is log(exp(gap) + others) - gap, written so that nothing cancels once the positives are learnt.
        return (torch.log1p(torch.expm1(gap) + others) - gap)[1:]

    def _blocks(self, cosines: Tensor, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The blocks' cosines, and the masked column of each row in all but the first."""
        N, first = len(self.u), cosines[:-1]
        blocks = [first, first * self.p.own_columns + first.roll(-1, 1) * self.p.next_columns]
        masked = [(row - 1).remainder(N)]
        if self.p.third_block:
            blocks.append(first * self.p.own_rows[row, None] + cosines[1:] * self.p.next_rows[row, None])
            masked.append((row + 1).remainder(N))
        return blocks, masked

    def _differentiate(
        self, dS: list[Tensor], blocks: list[Tensor], cosines: Tensor, row: Tensor, chunk: slice
    ) -> None:
        du, dv, own_columns, next_columns, own_rows, next_rows, dscale = self.gradients
        plain, of_columns, first = dS[0][1:], dS[1][1:], cosines[1:-1]
        if dscale is not None:
            products = [(a[1:] * b[1:]).sum(dtype=torch.float64) for a, b in zip(dS, blocks, strict=True)]
            dscale += torch.stack(products).sum().to(dscale.dtype)
        if own_columns is not None and next_columns is not None:
            own_columns += self.scale * (of_columns * first).sum(0)
            next_columns += self.scale * (of_columns * first.roll(-1, 1)).sum(0)
        to_queries = plain + of_columns * self.p.own_columns + (of_columns * self.p.next_columns).roll(1, 1)
        to_candidates = plain
        if self.p.third_block:
            of_rows, above = dS[2][1:], dS[2][:-1]
            if own_rows is not None and next_rows is not None:
                own_rows[chunk] = self.scale * (of_rows * first).sum(1)
                next_rows[chunk] = self.scale * (of_rows * cosines[2:]).sum(1)
            to_candidates = (
                plain + of_rows * self.p.own_rows[row[1:], None] + above * self.p.next_rows[row[:-1], None]
            )
        if not self.p.stop_gradient:
            to_queries = to_candidates = to_queries + to_candidates - plain
        if du is not None:
            torch.mm(to_queries, self.v, out=du[chunk]).mul_(self.scale)
        if dv is not None:
            dv.addmm_(to_candidates.T, self.u[chunk], alpha=self.scale)
