"""CLIP's loss on a GPU: a softmax over each row of the scores and one over each column, in four products.

A first walk sums up the exponentials of rows and of columns together and stores none of them. From there
on no cell depends on others: the second walk is a sigmoid's, with a cell's two probabilities added
up in the epilogue of the scores' product. The pairs, on the diagonal, are the exact cells of both softmaxes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastqt.engines.triton.sigmoid import SigmoidWalk
from fastqt.engines.triton.softmax import SUM_ROWS, FusedWalk
from fastqt.engines.triton.walk import Block, even, fitting, ranges, scale_on
from fastqt.kernels.cells import ExactCells
from fastqt.kernels.row_shifts import choose_row_shifts
from fastqt.kernels.row_stats import row_stats
from fastqt.kernels.scores import Tile, column_tiles, row_and_column_scores, row_tiles
from fastqt.problem import Needs, Problem, pairs


def walk(
    a: Tensor,  # (N, D)
    b: Tensor,  # (N, D)
    scale: float | Tensor,
    memory: str,
    found: Tensor,  # (4, N) float64
    weights: float | Tensor | None,  # (N,) float64
    needs: Needs,
    *,
    known: bool,
) -> tuple[Tensor | None, ...]:
    """The gradients of sum_i w_i loss_i, by way of what is found of each pair, unless it is known.

    That is the log-sum-exp of its row and of its column, dL/dS of its own cell, and its loss.
    """
    p = pairs(a, b, scale_on(a.device, scale), memory)
    if not known:
        _find_out(_Direction(p, found[0]), _Direction(replace(p, queries=b, candidates=a), found[1]), found)
    if weights is None:
        return None, None, None
    clip = ClipWalk(p, weights, needs, found)
    clip.run()
    gradients = clip.gradients()
    return gradients.queries, gradients.candidates, gradients.scale


class _Pairs(FusedWalk):
    """All cells but the diagonal's: those need no list of targets."""

    def look_at_rows(self, sampled: Tensor | None = None) -> None:
        """Exact cells and row shifts. Targets that nobody gave need no assertion."""
        choose_row_shifts(self.p, self.scale, self.groups, self.cells, self.state, sampled)

    def tile(self, block: Block, rows: slice, columns: slice | None = None) -> Tile:
        columns = columns or slice(0, self.M)
        matrix = block.matrix[columns]
        return Tile(rows.start, rows.stop - rows.start, matrix, columns.start, leave_out_diagonal=True)

    @functools.cached_property
    def _targets_by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each column's only target is that of its row."""
        return self.cells.starts, self.cells.columns, self.cells.columns


class _Direction(_Pairs):
    """A softmax over each row; over each column it is that of the scores transposed."""

    def __init__(self, p: Problem, logsumexp: Tensor) -> None:
        super().__init__(p, 1.0, Needs())
        self.state = replace(self.state, logsumexp=logsumexp)

    def sum_up(self, columns: _Direction) -> None:
        """Losses and exact cells of both directions, from one walk over the scores."""
        row_shift_log2 = self.state.row_shift_log2, columns.state.row_shift_log2
        chunks = list(self._chunks)
        sums = self.p.queries.new_empty(len(chunks), self.N, dtype=torch.float32)
        for rows, of_chunk in zip(chunks, sums, strict=True):
            tile = self.tile(self.blocks[0], rows)
            tile_row_sums = self._partial(self.N, tile.rows)
            of_columns = tile_row_sums.new_empty(row_tiles(tile.rows, self.config), self.N)
            row_and_column_scores(
                *(tile, self.p.queries, self.scale, row_shift_log2, self.config),
                tile_row_sums=tile_row_sums,
                tile_column_sums=of_columns,
            )
            row_stats(tile_row_sums, self.cells, self.state, rows.start, only_overflowed=False)
            torch.sum(of_columns, 0, out=of_chunk)
        row_stats(sums, columns.cells, columns.state, 0, only_overflowed=False)
        for rows in chunks:
            self.repair(rows)
            columns.repair(rows)

    @property
    def _chunks(self) -> Iterator[slice]:
        """Rows whose sums by blocks of columns, and the columns' by blocks of rows, are kept at a time."""
        line = 4 * (column_tiles(self.N, self.config) + row_tiles(self.N, self.config))
        return ranges(self.N, even(self.N, min(fitting(self.room, line), SUM_ROWS), self.config.rows))


def _find_out(rows: _Direction, columns: _Direction, found: Tensor) -> None:
    rows.sum_up(columns)
    torch.add(rows.cells.coefficients, columns.cells.coefficients, out=found[2])
    torch.add(rows.loss, columns.loss, out=found[3])
    found[2:].div_(2)


class ClipWalk(_Pairs, SigmoidWalk):
    """The gradients, once the softmaxes' sums are known."""

    def __init__(self, p: Problem, weights: float | Tensor, needs: Needs, found: Tensor) -> None:
        self.found = found
        super().__init__(p, weights, needs)

    def _exact_cells(self) -> ExactCells:
        _, columns, _ = self.p.targets.compressed()  # which nobody has to look at once more
        return replace(super()._exact_cells(), columns=columns)

    def prepare(self) -> None:
        """What makes exponentials of either direction's scores its half of dL/dS."""
        exact = self.found[:2] / math.log(2)
        self.row_shift_log2, self.column_shift_log2 = row_shift_log2 = exact.float()
        weights = self.prob_scale / 2 * self.weights / self.weight_norm
        self.row_weights, self.column_weights = (weights * (row_shift_log2 - exact).exp2_()).float()
        torch.mul(self.weights, self.found[2], out=self.cells.coefficients)
        self.state.factors.copy_(self.weight_norm / self.prob_scale)

    def fill(self, tile: Tile, out: Tensor | None, **_: Any) -> None:
        columns = slice(tile.first_column, tile.first_column + tile.candidates.shape[0])
        row_and_column_scores(
            *(tile, self.p.queries, self.scale),
            (self.row_shift_log2, self.column_shift_log2[columns]),
            self.config,
            factors=(self.row_weights, self.column_weights[columns]),
            total=out,
        )

    def conclude(self, rows: slice, tile_row_sums: Tensor) -> None:
        """There is nothing left to find out."""
