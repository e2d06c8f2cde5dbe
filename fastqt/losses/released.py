"""MixCSE's 3 N columns on a CPU: one matrix product for the scores of all three blocks, two for gradients.

With rows u and v of norm 1, a mixture m_j of v_j and v_j+1 is own_j v_j + next_j v_j+1, and a_i the same
of u. So the scores of the mixed blocks are sums of two neighbouring cosines, and their gradients fold back
onto those: 6 N² D operations in all. A chunk of rows is at hand at a time, with the rows above and below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_not_recorded

CHUNK_BYTES = 8 * 2**20  # of each of some eight matrices of as many rows
MIN_ROWS = 64

Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Options:
    """What of `mixcse_loss` its three blocks depend on."""

    both: bool  # the third block is there
    excluded: bool  # masked cells have no score, rather than 0
    weight: float  # added to the scores of a sentence with its own mixtures
    stop_gradient: bool


def released_loss(
    u: Tensor,  # (N, D), rows of norm 1
    v: Tensor,  # (N, D), the same
    columns: tuple[Tensor, Tensor],  # own and next, (N,): shares of the mixtures of v, as they are at norm 1
    rows: tuple[Tensor, Tensor],  # of those of u
    scale: Tensor,  # ()
    reduction: str,
    options: Options,
) -> Tensor:
    """The loss of rows whose partners are the next ones, reduced; differentiable once in all tensors."""
    apply: Callable[..., Tensor] = _Released.apply  # torch gives `apply` no types
    return apply(torch.is_grad_enabled(), reduction, options, u, v, *columns, *rows, scale)


class _Released(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: bool, reduction: str, options: Options, *inputs: Tensor) -> Tensor:
        N, needs = len(inputs[0]), ctx.needs_input_grad[3:]
        ctx.options, ctx.at_once = options, recorded and reduction != "none" and any(needs)
        ctx.save_for_backward(*inputs)
        weights = inputs[0].new_full((N,), 1 / N if reduction == "mean" else 1.0) if ctx.at_once else None
        walk = _Walk(inputs, options, weights, needs)
        # Autocast was heeded by whoever made the inputs.
        with torch.autocast(inputs[0].device.type, enabled=False):
            losses = walk.run()
        ctx.gradients = walk.gradients
        loss = losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
        return loss.to(inputs[0].dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_not_recorded("fastqt.mixcse_loss")
        inputs, (g,) = ctx.saved_tensors, upstream
        if ctx.at_once:
            return (None, None, None, *(x if x is None else x * g for x in ctx.gradients))
        walk = _Walk(inputs, ctx.options, g.contiguous(), ctx.needs_input_grad[3:])
        walk.run()
        return (None, None, None, *walk.gradients)


class _Walk:
    """Each row's loss, and with weights w the gradients of sum_i w_i loss_i."""

    def __init__(
        self, inputs: tuple[Tensor, ...], options: Options, weights: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        self.u, self.v, *shares, scale = inputs
        self.own_columns, self.next_columns, self.own_rows, self.next_rows = shares
        self.scale, self.options, self.weights = scale.item(), options, weights
        if not math.isfinite(self.scale):
            raise ValueError(f"scale: want a finite number, got {self.scale}")
        self.gradients: Gradients = tuple(
            torch.zeros_like(x) if need and weights is not None else None
            for x, need in zip(inputs, needs, strict=True)
        )

    def run(self) -> Tensor:
        """(N,) float64."""
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
        around = torch.arange(chunk.start - 1, chunk.stop + 1, device=self.u.device).remainder(N)
        cosines = self.u[around] @ self.v.T
        # The row above has had its loss, but its mixture holds the chunk's first row.
        row, at = around[:-1], torch.arange(len(around) - 1, device=self.u.device)
        blocks, masked = self._blocks(cosines, row)
        scores = [self.scale * block for block in blocks]
        for block, column in zip(scores[1:], masked, strict=True):
            block[at, row] += self.options.weight
            block[at, column] = -math.inf if self.options.excluded else 0.0
        positive = scores[0][at, row]
        largest = torch.stack([block.amax(1) for block in scores]).amax(0)
        E = [block.sub_(largest[:, None]).exp_() for block in scores]
        E[0][at, row] = 0
        others = torch.stack([block.sum(1, dtype=torch.float64) for block in E]).sum(0)
        gap = (positive - largest).double()
        if self.weights is not None:
            factor = self.weights[row].double() / (gap.exp() + others)
            for block, column in zip(E[1:], masked, strict=True):
                block[at, column] = 0
            dS = [block.mul_(factor.to(block.dtype)[:, None]) for block in E]
            dS[0][at, row] = (-others * factor).to(dS[0].dtype)
            self._differentiate(dS, blocks, cosines, row, chunk)
        # log(exp(gap) + others) - gap, where nothing cancels when all is learnt.
        return (torch.log1p(torch.expm1(gap) + others) - gap)[1:]

    def _blocks(self, cosines: Tensor, row: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The blocks' cosines, and the masked column of each row in all but the first."""
        N, first = len(self.u), cosines[:-1]
        blocks = [first, first * self.own_columns + first.roll(-1, 1) * self.next_columns]
        masked = [(row - 1).remainder(N)]
        if self.options.both:
            blocks.append(first * self.own_rows[row, None] + cosines[1:] * self.next_rows[row, None])
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
        to_queries = plain + of_columns * self.own_columns + (of_columns * self.next_columns).roll(1, 1)
        to_candidates = plain
        if self.options.both:
            of_rows, above = dS[2][1:], dS[2][:-1]
            if own_rows is not None and next_rows is not None:
                own_rows[chunk] = self.scale * (of_rows * first).sum(1)
                next_rows[chunk] = self.scale * (of_rows * cosines[2:]).sum(1)
            to_candidates = (
                plain + of_rows * self.own_rows[row[1:], None] + above * self.next_rows[row[:-1], None]
            )
        if not self.options.stop_gradient:
            to_queries = to_candidates = to_queries + to_candidates - plain
        if du is not None:
            torch.mm(to_queries, self.v, out=du[chunk]).mul_(self.scale)
        if dv is not None:
            dv.addmm_(to_candidates.T, self.u[chunk], alpha=self.scale)
