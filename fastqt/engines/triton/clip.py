"""CLIP's loss on a GPU: a softmax over each row of the scores and one over each column, in four products.

A first walk sums the exponentials of rows and of columns together and stores none of them. After it no cell
depends on others, as with a sigmoid: in the second walk the epilogue of the scores' product adds up a cell's
two probabilities. The pairs, on the diagonal, are the exact cells of both softmaxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from fastqt.engines.triton import loop
from fastqt.engines.triton.loop import SUM_ROWS
from fastqt.engines.triton.operands import Operands, even, fitting, ranges, scale_on, weighted_sum
from fastqt.engines.triton.scores import Norms, Scores
from fastqt.engines.triton.softmax import Softmax
from fastqt.kernels.row_stats import row_stats
from fastqt.kernels.scores import Tile, column_tiles, row_and_column_scores, row_tiles
from fastqt.problem import ClipProblem, Gradients, Needs, Problem, Rows
from fastqt.targets import Diagonal


def gradients_in_forward(p: ClipProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: ClipProblem) -> Rows:
    """The loss of each pair; saved are the logsumexps of its row and column, and dL/dS of its own cell."""
    pairs = _pairs(p)
    found = _sums(pairs, Norms.of(pairs))
    return Rows(found[3], (found[:3],))


def forward_with_gradients(p: ClipProblem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    pairs = _pairs(p)
    norms = Norms.of(pairs)
    found = _sums(pairs, norms)
    return weighted_sum(found[3], row_weight), _gradients(pairs, norms, found[:3], row_weight, needs)


def backward(p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    (sums,) = saved
    pairs = _pairs(p)
    return _gradients(pairs, Norms.of(pairs), sums, row_weights, needs)


def _pairs(p: ClipProblem) -> Problem:
    """The softmax over rows, whose targets are the pairs."""
    targets = Diagonal().rows(len(p.queries), len(p.candidates), p.queries.device)
    scale = scale_on(p.queries.device, p.scale)
    options = "keep", None, None, None, p.memory
    return Problem(p.queries, p.candidates, None, None, scale, targets, *options, normalize=p.normalize)


def _sums(pairs: Problem, norms: Norms) -> Tensor:
    """What is known of each pair, (4, N) float64, from one walk over the scores.

    These are the logsumexp of its row and of its column, dL/dS of its own cell, and its loss.
    """
    found = pairs.queries.new_empty(4, len(pairs.queries), dtype=torch.float64)
    transposed = replace(pairs, queries=pairs.candidates, candidates=pairs.queries)
    rows, columns = (
        Softmax(operands, Scores(operands, pairs=True, logsumexp=logsumexp, norms=of_side))
        for operands, logsumexp, of_side in zip(
            (Operands(p, 1.0, Needs()) for p in (pairs, transposed)),
            found[:2],
            (norms, Norms(norms.candidates, norms.queries)),
            strict=True,
        )
    )
    o, config = rows.operands, rows.scores.config
    shifts = rows.scores.state.row_shift_log2, columns.scores.state.row_shift_log2
    chunks = list(_chunks(rows))
    column_sums = pairs.queries.new_empty(len(chunks), o.N, dtype=torch.float32)
    for chunk, chunk_sums in zip(chunks, column_sums, strict=True):
        tile = rows.scores.tile(o.blocks[0], chunk)
        tile_row_sums, _ = rows.scores.tile_row_sums(chunk)
        tile_column_sums = tile_row_sums.new_empty(row_tiles(tile.rows, config), o.N)
        row_and_column_scores(
            *(tile, pairs.queries, o.scale, shifts, config),
            tile_row_sums=tile_row_sums,
            tile_column_sums=tile_column_sums,
        )
        row_stats(tile_row_sums, rows.scores.cells, rows.scores.state, chunk.start)
        torch.sum(tile_column_sums, 0, out=chunk_sums)
    row_stats(column_sums, columns.scores.cells, columns.scores.state, 0)
    for chunk in chunks:
        rows.repair(chunk)
        columns.repair(chunk)
    torch.add(rows.scores.cells.coefficients, columns.scores.cells.coefficients, out=found[2])
    torch.add(rows.operands.loss, columns.operands.loss, out=found[3])
    found[2:].div_(2)
    return found


def _chunks(rows: Softmax) -> Iterator[slice]:
    """Rows whose sums by tiles of columns, and the columns' by tiles of rows, are kept at once."""
    o, config = rows.operands, rows.scores.config
    line = 4 * (column_tiles(o.N, config) + row_tiles(o.N, config))
    return ranges(o.N, even(o.N, min(fitting(o.room, line), SUM_ROWS), config.rows))


def _gradients(
    pairs: Problem, norms: Norms, sums: Tensor, weights: float | Tensor, needs: Needs
) -> Gradients:
    operands = Operands(pairs, weights, needs)
    loop.run_cells(_RowsAndColumns(operands, norms, sums))
    return operands.gradients()


class _RowsAndColumns:
    """The link of CLIP's gradients, once the sums of both softmaxes are known."""

    def __init__(self, operands: Operands, norms: Norms, sums: Tensor) -> None:
        self.operands = operands
        self.scores = Scores(operands, pairs=True, norms=norms, both_ways=True)
        # The targets of pairs are known, so that no kernel has to look at them.
        _, columns, _ = operands.p.targets.compressed()
        self.scores.cells = replace(self.scores.cells, columns=columns)
        exact_log2 = sums[:2] / math.log(2)
        self.row_shift_log2, self.column_shift_log2 = shifts = exact_log2.float()
        # Of a cell's dL/dS each direction gives half; what rounding took from the shifts is given back.
        weights = operands.prob_scale / 2 * operands.weights / operands.weight_norm
        self.row_weights, self.column_weights = (weights * (shifts - exact_log2).exp2_()).float()
        torch.mul(operands.weights, sums[2], out=self.scores.cells.coefficients)
        self.scores.set_factors(operands.weight_norm / operands.prob_scale)

    def whole_rows(self, rows: slice, E: Tensor | None) -> None:
        """Fills E, if given, with all columns of some rows, of which all is known."""
        if E is not None:
            self.fill(self.scores.tile(self.operands.blocks[0], rows), E[:, : self.operands.N], None, None)

    def begin(self, rows: slice) -> None:
        """Nothing has to be known of rows before."""

    def fill(
        self, tile: Tile, out: Tensor | None, tile_row_sums: Tensor | None, tile_column_sums: Tensor | None
    ) -> None:
        """Fills a tile with both directions' dL/dS; there is nothing left to sum."""
        o = self.operands
        columns = slice(tile.first_column, tile.first_column + tile.candidates.shape[0])
        row_and_column_scores(
            *(tile, o.p.queries, o.scale, (self.row_shift_log2, self.column_shift_log2[columns])),
            self.scores.config,
            factors=(self.row_weights, self.column_weights[columns]),
            total=out,
        )

    def conclude(self, rows: slice, tile_row_sums: Tensor, product: Tensor | None) -> None:
        """There is nothing left to find."""

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E, which holds the weights."""
        self.fill(tile, out, None, None)
