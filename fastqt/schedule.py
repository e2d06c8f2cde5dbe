"""The CPU engine: the loss and its gradients, tile by tile of the score matrix.

The walk itself is C++, in csrc/cpu/contrastive.cpp. `forward_with_gradients` makes all three
matrix products on a chunk of whole rows while its scores are at hand, 6 N M D operations in all.
`forward` only reduces scores to a log-sum-exp a row, and `backward` computes them once more from
there: 8 N M D, in tiles of a fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt.problem import DIAGONALS, Problem, finite_scale, target_error

CHUNK_BYTES = 48 * 2**20  # whole rows: the longer a chunk, the nearer its products come to full speed
MIN_CHUNK_ROWS = 64
TILE_ROWS, TILE_COLUMNS = 1024, 4096

# glibc maps every large block afresh, which costs a page fault for each of its pages at each
# call, until it has seen a block of that size freed. This one is never touched.
torch.empty(31 * 2**20, dtype=torch.uint8)


@dataclass
class Needs:
    """Which inputs want a gradient."""

    queries: bool
    candidates: bool
    negatives: bool
    row_negatives: bool
    scale: bool


@dataclass
class Rows:
    """What is known of each row, (N,) float64: log-sum-exp, target mass, and the loss."""

    logsumexp: Tensor
    mass: Tensor
    loss: Tensor


@dataclass
class Gradients:
    queries: Tensor | None = None
    candidates: Tensor | None = None
    negatives: Tensor | None = None
    row_negatives: Tensor | None = None
    scale: Tensor | None = None


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    found = _empty_rows(p)
    _walk(p, TILE_ROWS, TILE_COLUMNS, 1.0, None, (found.logsumexp, found.mass, found.loss), Gradients())
    return found


def forward_with_gradients(p: Problem, weight: float, needs: Needs) -> tuple[Rows, Gradients]:
    """The loss of each row, and the gradients of weight * sum_i loss_i."""
    found, gradients = _empty_rows(p), _empty_gradients(p, needs)
    columns = sum(0 if x is None else len(x) for x in (p.candidates, p.negatives))
    row_bytes = (columns + (p.row_negatives is not None)) * p.queries.element_size()
    rows = max(CHUNK_BYTES // row_bytes, MIN_CHUNK_ROWS)
    _walk(p, rows, None, weight, None, (found.logsumexp, found.mass, found.loss), gradients)
    return found, gradients


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    gradients = _empty_gradients(p, needs)
    _walk(p, TILE_ROWS, TILE_COLUMNS, 1.0, row_weights, (logsumexp, mass, None), gradients)
    return gradients


def _walk(
    p: Problem,
    rows: int,
    columns: int | None,  # of a tile; None: whole rows
    weight: float,
    row_weights: Tensor | None,
    found: tuple[Tensor, Tensor, Tensor | None],  # of each row, what Rows holds
    g: Gradients,
) -> None:
    t = p.targets
    report = torch.empty(3, dtype=torch.int64)
    torch.ops.fastqt.contrastive_walk_(
        *(p.queries, p.candidates, p.negatives, p.row_negatives, finite_scale(p)),
        *(DIAGONALS.index(p.diagonal), t.starts, t.columns, t.weights, t.dense, t.background),
        *(p.query_groups, p.candidate_groups, p.mask),
        *(rows, columns, weight, row_weights, *found),
        *(g.queries, g.candidates, g.negatives, g.row_negatives, g.scale, report),
    )
    status, row, column = report.tolist()
    if status:
        raise target_error(status, row, column, p)


def _empty_rows(p: Problem) -> Rows:
    logsumexp, mass, loss = (torch.empty(p.queries.shape[0], dtype=torch.float64) for _ in range(3))
    return Rows(logsumexp, mass, loss)


def _empty_gradients(p: Problem, needs: Needs) -> Gradients:
    def like(x: Tensor | None, wanted: bool) -> Tensor | None:
        return torch.empty(x.shape, dtype=x.dtype) if wanted and x is not None else None

    return Gradients(
        like(p.queries, needs.queries),
        like(p.candidates, needs.candidates),
        like(p.negatives, needs.negatives),
        like(p.row_negatives, needs.row_negatives),
        torch.empty((), dtype=torch.float64) if needs.scale else None,
    )
