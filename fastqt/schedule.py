"""What is computed when: the loss and its gradients, tile by tile of the score matrix.

Three matrix products make a gradient: the scores S = s F Gᵀ, dF = dS G and dG = dSᵀ F.
`forward_with_gradients` does all three on a chunk of whole rows while its scores are at
hand, 6 N M D operations in all. `forward` only reduces scores to a log-sum-exp a row, and
`backward` computes them once more from there: 8 N M D, in tiles of a fixed size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
    run = _Run(p, Needs(False, False, False, False, False))
    N = p.queries.shape[0]
    logsumexp = torch.full((N,), -math.inf, dtype=torch.float64)
    mass, linear = torch.zeros(N, dtype=torch.float64), torch.zeros(N, dtype=torch.float64)
    for rows in _ranges(N, TILE_ROWS):
        for tile in run.tiles(rows):
            run.score(tile)
            torch.ops.fastqt.softmax_tile_(*run.cells(tile), logsumexp, mass, linear, run.status)
    run.check()
    return Rows(logsumexp, mass, torch.where(mass > 0, mass * logsumexp + linear, 0))


def forward_with_gradients(p: Problem, weight: float, needs: Needs) -> tuple[Rows, Gradients]:
    """The loss of each row, and the gradients of weight * sum_i loss_i."""
    run = _Run(p, needs)
    N = p.queries.shape[0]
    found = Rows(*(torch.empty(N, dtype=torch.float64) for _ in range(3)))
    row_bytes = run.width * p.queries.element_size()
    for rows in _ranges(N, max(CHUNK_BYTES // row_bytes, MIN_CHUNK_ROWS)):
        tile = run.whole_rows(rows)
        run.score(tile)
        torch.ops.fastqt.softmax_rows_(
            *(tile.scores, rows.start, *run.problem_cells, weight),
            *(found.logsumexp, found.mass, found.loss, run.status),
        )
        run.multiply(tile)
    run.check()
    return found, run.gradients


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    run = _Run(p, needs)
    for rows in _ranges(p.queries.shape[0], TILE_ROWS):
        for tile in run.tiles(rows):
            run.score(tile)
            torch.ops.fastqt.softmax_tile_backward_(
                *run.cells(tile), row_weights, logsumexp, mass, run.status
            )
            run.multiply(tile)
    run.check()
    return run.gradients


class _SharedColumns:
    """Candidates or negatives: columns of the score matrix that belong to all rows."""

    def __init__(self, matrix: Tensor, first: int, wants_gradient: bool) -> None:
        self.matrix = _for_blas(matrix)
        self.first = first
        self.width = matrix.shape[0]
        self.gradient = torch.empty(matrix.shape, dtype=matrix.dtype) if wants_gradient else None

    def score(self, out: Tensor, f: Tensor, rows: slice, columns: slice, scale: float) -> None:
        out.addmm_(f, _part(self.matrix, columns).T, beta=0, alpha=scale)

    def add_to_queries(self, out: Tensor, dS: Tensor, rows: slice, columns: slice, scale: float) -> None:
        first = self.first == 0 and columns.start == 0
        out.addmm_(dS, _part(self.matrix, columns), beta=0 if first else 1, alpha=scale)

    def add_to_own(self, dS: Tensor, f: Tensor, rows: slice, columns: slice, scale: float) -> None:
        if self.gradient is not None:
            _part(self.gradient, columns).addmm_(dS.T, f, beta=0 if rows.start == 0 else 1, alpha=scale)


class _PrivateColumn:
    """Row negatives: one column, with another embedding for each row."""

    width = 1

    def __init__(self, matrix: Tensor, first: int, wants_gradient: bool) -> None:
        self.matrix = matrix
        self.first = first
        self.gradient = torch.empty(matrix.shape, dtype=matrix.dtype) if wants_gradient else None

    def score(self, out: Tensor, f: Tensor, rows: slice, columns: slice, scale: float) -> None:
        torch.sum(f * self.matrix[rows], 1, keepdim=True, out=out).mul_(scale)

    def add_to_queries(self, out: Tensor, dS: Tensor, rows: slice, columns: slice, scale: float) -> None:
        out.addcmul_(dS, self.matrix[rows], value=scale)

    def add_to_own(self, dS: Tensor, f: Tensor, rows: slice, columns: slice, scale: float) -> None:
        if self.gradient is not None:
            torch.mul(f, dS * scale, out=self.gradient[rows])


_Block = _SharedColumns | _PrivateColumn


@dataclass
class _Tile:
    """Some rows of the score matrix against some columns, which may span blocks."""

    rows: slice
    queries: Tensor  # those rows'
    first_column: int
    scores: Tensor
    parts: list[tuple[_Block, slice, Tensor]]  # block, its columns, their part of `scores`


class _Run:
    """The state of one walk over the score matrix."""

    def __init__(self, p: Problem, needs: Needs) -> None:
        M = p.candidates.shape[0]
        self.p = p
        self.needs = needs
        self.queries = _for_blas(p.queries)
        self.scale = finite_scale(p)
        self.blocks: list[_Block] = [_SharedColumns(p.candidates, 0, needs.candidates)]
        self.width = M
        if p.negatives is not None:
            self.blocks.append(_SharedColumns(p.negatives, self.width, needs.negatives))
            self.width += p.negatives.shape[0]
        if p.row_negatives is not None:
            self.blocks.append(_PrivateColumn(p.row_negatives, self.width, needs.row_negatives))
            self.width += 1
        self.gradients = Gradients(
            queries=torch.empty(p.queries.shape, dtype=p.queries.dtype) if needs.queries else None,
            candidates=self.blocks[0].gradient,
            negatives=self.blocks[1].gradient if p.negatives is not None else None,
            row_negatives=self.blocks[-1].gradient if p.row_negatives is not None else None,
            scale=torch.zeros((), dtype=torch.float64) if needs.scale else None,
        )
        self.status = torch.zeros(3, dtype=torch.int64)
        self._workspace: Tensor | None = None
        t = p.targets
        self.problem_cells = (
            *(M, DIAGONALS.index(p.diagonal)),
            *(t.starts, t.columns, t.weights, t.dense, t.background),
            *(p.query_groups, p.candidate_groups, p.mask),
        )

    def whole_rows(self, rows: slice) -> _Tile:
        scores = self._scores(rows, self.width)
        parts = [
            (block, slice(0, block.width), _columns(scores, block.first, block.width))
            for block in self.blocks
        ]
        return _Tile(rows, _part(self.queries, rows), 0, scores, parts)

    def tiles(self, rows: slice) -> Iterator[_Tile]:
        queries = _part(self.queries, rows)
        for block in self.blocks:
            for columns in _ranges(block.width, TILE_COLUMNS):
                scores = self._scores(rows, columns.stop - columns.start)
                yield _Tile(rows, queries, block.first + columns.start, scores, [(block, columns, scores)])

    def _scores(self, rows: slice, width: int) -> Tensor:
        height = rows.stop - rows.start
        if self._workspace is None or self._workspace.numel() < height * width:
            self._workspace = torch.empty(height, width, dtype=self.p.queries.dtype)
            return self._workspace
        return self._workspace.view(-1)[: height * width].view(height, width)

    def score(self, tile: _Tile) -> None:
        for block, columns, scores in tile.parts:
            block.score(scores, tile.queries, tile.rows, columns, self.scale)

    def cells(self, tile: _Tile) -> tuple[object, ...]:
        """The tile and what there is to know of its cells, as the tile kernels take them."""
        return (tile.scores, tile.rows.start, tile.first_column, *self.problem_cells)

    def multiply(self, tile: _Tile) -> None:
        """Adds dS's part to the gradients."""
        for block, columns, dS in tile.parts:
            block.add_to_own(dS, tile.queries, tile.rows, columns, self.scale)
        if self.needs.scale:
            self._add_to_scale(tile)
        elif self.gradients.queries is not None:
            gradient = _part(self.gradients.queries, tile.rows)
            for block, columns, dS in tile.parts:
                block.add_to_queries(gradient, dS, tile.rows, columns, self.scale)

    def _add_to_scale(self, tile: _Tile) -> None:
        """dL/ds = <F, dS G>, so dS G is needed before it is scaled."""
        product = torch.zeros_like(tile.queries)
        for block, columns, dS in tile.parts:
            block.add_to_queries(product, dS, tile.rows, columns, 1.0)
        assert self.gradients.scale is not None
        self.gradients.scale += (tile.queries * product).sum(dtype=torch.float64)
        if self.gradients.queries is not None:
            queries = _part(self.gradients.queries, tile.rows)
            if tile.first_column == 0:
                torch.mul(product, self.scale, out=queries)
            else:
                queries.add_(product, alpha=self.scale)

    def check(self) -> None:
        status, row, column = self.status.tolist()
        if status:
            raise target_error(status, row, column, self.p)


def _ranges(n: int, step: int) -> Iterator[slice]:
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def _part(matrix: Tensor, rows: slice) -> Tensor:
    """matrix[rows], at no cost where that is all of it."""
    return matrix if rows.stop - rows.start == matrix.shape[0] else matrix[rows]


def _columns(matrix: Tensor, first: int, width: int) -> Tensor:
    return matrix if width == matrix.shape[1] else matrix[:, first : first + width]


def _for_blas(matrix: Tensor) -> Tensor:
    """The matrix in a layout that BLAS reads in place, so that no product copies it."""
    rows, columns = matrix.shape
    row_major = matrix.stride(1) == 1 and matrix.stride(0) >= columns
    column_major = matrix.stride(0) == 1 and matrix.stride(1) >= rows
    return matrix if row_major or column_major else matrix.contiguous()
