"""MixCSE's three blocks of scores on a CPU: one walk over chunks of rows, 6 N² D operations in all.

The walk is C++, in csrc/cpu/three_block.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines.cpu import contrastive
from fastqt.problem import (
    Rows,
    ThreeBlockGradients,
    ThreeBlockNeeds,
    ThreeBlockProblem,
    finite_scale,
    room_of,
)
from fastqt.steps import even_step


def gradients_in_forward(p: ThreeBlockProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: ThreeBlockProblem) -> Rows:
    """The loss of each row."""
    return Rows(_walk(p, None, ThreeBlockNeeds())[0], ())


def forward_with_gradients(
    p: ThreeBlockProblem, row_weight: float, needs: ThreeBlockNeeds
) -> tuple[Tensor, ThreeBlockGradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    weights = p.queries.new_full((len(p.queries),), row_weight, dtype=torch.float64)
    loss, gradients = _walk(p, weights, needs)
    return (row_weight * loss.sum()).to(p.queries.dtype), gradients


def backward(
    p: ThreeBlockProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: ThreeBlockNeeds
) -> ThreeBlockGradients:
    """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
    return _walk(p, row_weights, needs)[1]


def _walk(
    p: ThreeBlockProblem,
    weights: Tensor | None,  # (N,) float64
    needs: ThreeBlockNeeds,
) -> tuple[Tensor, ThreeBlockGradients]:
    """The loss of each row, (N,) float64, and with weights the gradients that are needed."""
    loss = p.queries.new_empty(len(p.queries), dtype=torch.float64)
    shares = torch.stack((p.own_columns, p.next_columns, p.own_rows, p.next_rows)).to(p.queries.dtype)
    dqueries = p.queries.new_empty(p.queries.shape) if needs.queries else None
    dcandidates = p.candidates.new_empty(p.candidates.shape) if needs.candidates else None
    dshares = torch.empty_like(shares) if any(needs[2:6]) else None
    dscale = loss.new_empty(()) if needs.scale else None

    torch.ops.fastqt.three_block_walk_.default(
        p.queries,
        p.candidates,
        shares,
        finite_scale(p.scale),
        p.third_block,
        p.masks_excluded,
        p.own_mixture_weight,
        p.stop_gradient,
        _chunk_rows(p),
        loss,
        weights,
        dqueries,
        dcandidates,
        dshares,
        dscale,
    )

    of_shares: list[Tensor | None] = [None] * 4
    if dshares is not None:
        rows = dshares.to(p.own_columns.dtype)
        of_shares = [row if need else None for row, need in zip(rows, needs[2:6], strict=True)]
    own_columns, next_columns, own_rows, next_rows = of_shares
    return loss, ThreeBlockGradients(
        dqueries,
        dcandidates,
        own_columns,
        next_columns,
        own_rows,
        next_rows,
        scale=None if dscale is None else dscale.to(p.scale.dtype),
    )


def _chunk_rows(p: ThreeBlockProblem) -> int:
    """How many rows of cosines are walked at once, beside which there are two matrices of gradients."""
    N = len(p.queries)
    room = min(room_of(p.memory, contrastive.CHUNK_BYTES, contrastive.LOW_BYTES), contrastive.CHUNK_BYTES)
    rows = room // (3 * N * p.queries.element_size())
    return even_step(N, max(rows, contrastive.MIN_CHUNK_ROWS))
