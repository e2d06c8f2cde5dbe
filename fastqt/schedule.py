"""The CPU engine: the loss and its gradients, tile by tile of the score matrix.

The walk itself is C++, in csrc/cpu/contrastive.cpp. `forward_with_gradients` makes all three
matrix products on a chunk of whole rows while its scores are at hand, 6 N M D operations in all.
`forward` only reduces scores to a log-sum-exp a row, and `backward` computes them once more from
there: 8 N M D, in tiles of a fixed size. A sigmoid's gradients take three products in any tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt.problem import DIAGONALS, LINKS, Problem, finite_scale, target_error

CHUNK_BYTES = 48 * 2**20  # of scores: the larger a chunk, the nearer its products come to full speed
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
    bias: bool = False


@dataclass
class Rows:
    """What is known of each row, (N,) float64: log-sum-exp and target mass (of a softmax), and the loss."""

    logsumexp: Tensor
    mass: Tensor
    loss: Tensor
    # The weighted sum of the losses, () float32, of an engine that finds it on the way.
    total: Tensor | None = None


@dataclass
class Gradients:
    queries: Tensor | None = None
    candidates: Tensor | None = None
    negatives: Tensor | None = None
    row_negatives: Tensor | None = None
    scale: Tensor | None = None
    bias: Tensor | None = None


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    found = _new_rows(p)
    _walk(p, (TILE_ROWS, TILE_COLUMNS), found, None, Gradients())
    return found


def forward_with_gradients(p: Problem, weight: float, needs: Needs) -> tuple[Rows, Gradients]:
    """The loss of each row, and the gradients of weight * sum_i loss_i."""
    found, gradients = _new_rows(p), _empty_gradients(p, needs)
    _walk(p, _gradient_tile(p), found, torch.full_like(found.loss, weight), gradients)
    return found, gradients


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    gradients = _empty_gradients(p, needs)
    found = Rows(logsumexp, mass, torch.empty_like(mass))
    _walk(p, (TILE_ROWS, TILE_COLUMNS), found, row_weights, gradients)
    return gradients


def _gradient_tile(p: Problem) -> tuple[int, int | None]:
    """Rows and columns of the tiles on which loss and gradients are found at once; None: whole rows."""
    if p.link == "sigmoid" and p.memory == "low":
        return TILE_ROWS, TILE_COLUMNS
    N, width = len(p.queries), len(p.candidates) + (0 if p.negatives is None else len(p.negatives))
    cells = CHUNK_BYTES // p.queries.element_size()
    if p.link == "softmax":
        return _even(N, max(cells // (width + (p.row_negatives is not None)), MIN_CHUNK_ROWS)), None
    # A square tile is the one that the products read and add to the least for.
    rows = _even(N, max(math.isqrt(cells), cells // width, 1))
    return rows, _even(width, max(cells // rows, 1))


def _even(length: int, most: int) -> int:
    """The least step that covers `length` in as few steps as `most` would."""
    return math.ceil(length / math.ceil(length / most))


def _walk(
    p: Problem,
    tile: tuple[int, int | None],  # rows, columns; None: whole rows
    found: Rows,
    row_weights: Tensor | None,
    g: Gradients,
) -> None:
    t = p.targets
    report = torch.empty(3, dtype=torch.int64)
    torch.ops.fastqt.contrastive_walk_(
        *(p.queries, p.candidates, p.negatives, p.row_negatives, p.bias, finite_scale(p)),
        *(LINKS.index(p.link), DIAGONALS.index(p.diagonal)),
        *(t.starts, t.columns, t.weights, t.dense, t.background),
        *(p.query_groups, p.candidate_groups, p.mask),
        *(*tile, row_weights, found.logsumexp, found.mass, found.loss),
        *(g.queries, g.candidates, g.negatives, g.row_negatives, g.bias, g.scale, report),
    )
    status, row, column = report.tolist()
    if status:
        raise target_error(status, row, column, p)


def _new_rows(p: Problem) -> Rows:
    logsumexp, mass, loss = (torch.zeros(p.queries.shape[0], dtype=torch.float64) for _ in range(3))
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
        like(p.bias, needs.bias),
    )
