"""CLIP's loss on a GPU: a softmax over each row of the scores and one over each column, in four products.

A first walk sums the exponentials of rows and of columns together and stores none of them. After it no cell
depends on others, as with a sigmoid: in the second walk the epilogue of the scores' product adds up a cell's
two probabilities. The pairs, on the diagonal, are the exact cells of both softmaxes.

A rectangle of the scores has the same two walks. The sums of its first walk lack the pairs, which the caller
adds to those of all rectangles.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from fastqt.engines.reference import clip as reference_clip
from fastqt.engines.triton import walks
from fastqt.engines.triton.copies import Copies
from fastqt.engines.triton.free_memory import asked_again_if_none_is_left
from fastqt.engines.triton.loop import SUM_ROWS
from fastqt.engines.triton.operands import Operands, fitting, ranges, room_for, scale_tensor, weighted_sum
from fastqt.engines.triton.scores import Norms, Scores
from fastqt.engines.triton.softmax import Softmax
from fastqt.kernels.scores import Tile, column_tiles, row_and_column_scores, row_tiles
from fastqt.problem import (
    ClipProblem,
    ClipSide,
    ClipSums,
    Gradients,
    Needs,
    Problem,
    Rows,
    positive_scores,
)
from fastqt.steps import even_step
from fastqt.targets import Diagonal, NoTargets, Targets


def gradients_in_forward(p: ClipProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


@asked_again_if_none_is_left
def forward(p: ClipProblem) -> Rows:
    """The loss of each pair; saved are the logsumexps of its row and column, and dL/dS of its own cell."""
    pairs = _pairs(p)
    sums_of_pairs = _sums(pairs, Norms.of(pairs), _copies(pairs))
    return Rows(sums_of_pairs[3], (sums_of_pairs[:3],))


@asked_again_if_none_is_left
def forward_with_gradients(p: ClipProblem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    pairs = _pairs(p)
    norms, copies = Norms.of(pairs), _copies(pairs)
    sums_of_pairs = _sums(pairs, norms, copies)
    return weighted_sum(sums_of_pairs[3], row_weight), _gradients(
        pairs, norms, copies, sums_of_pairs[:3], row_weight, needs
    )


@asked_again_if_none_is_left
def backward(p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    (sums,) = saved
    pairs = _pairs(p)
    return _gradients(pairs, Norms.of(pairs), _copies(pairs), sums, row_weights, needs)


@asked_again_if_none_is_left
def sums(p: ClipProblem) -> ClipSums:
    """The score of each pair of a rectangle, and the logsumexps of all other cells."""
    if not p.has_cells:
        return reference_clip.sums(p)

    pairs = _pairs(p)
    norms, copies = Norms.of(pairs), _copies(pairs)
    new = p.queries.new_empty
    row_others, column_others = (new(len(x), dtype=torch.float64) for x in (p.queries, p.candidates))
    transposed = replace(p, queries=p.candidates, candidates=p.queries)

    problems = (_problem(side, NoTargets(), "log_sum_exp") for side in (p, transposed))
    _sum_up(*_both_ways(problems, norms, copies, (row_others, column_others), pairs=p.pairs != 0))
    return ClipSums(_pair_scores(p, norms, copies), row_others, column_others)


@asked_again_if_none_is_left
def gradients_from(
    p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
) -> Gradients:
    """The gradients of a rectangle, of which dL/dS is `pairs` at the pairs and the sides' elsewhere."""
    if not p.has_cells:
        return reference_clip.gradients_from(p, rows, columns, pairs, needs)

    problem = _pairs(p)
    # No cell's dL/dS is larger than this, so that divided by it all of them fit float16.
    largest = rows.weights.abs().amax() + columns.weights.abs().amax()
    operands = Operands(problem, largest.expand(len(p.queries)), needs)

    of_rows, of_columns = (
        _shifted(side.logsumexp, operands.prob_scale * side.weights / operands.weight_norm)
        for side in (rows, columns)
    )
    shifts, weights = zip(of_rows, of_columns, strict=True)
    return _computed(_RowsAndColumns(operands, Norms.of(problem), shifts, weights, pairs.float()))


def _pairs(p: ClipProblem) -> Problem:
    """The softmax over rows, whose targets are the pairs."""
    return _problem(p, NoTargets() if p.pairs == 0 else Diagonal())


def _problem(p: ClipProblem, targets: Targets, link: str = "softmax") -> Problem:
    rows = targets.rows(len(p.queries), len(p.candidates), p.queries.device)
    scale = scale_tensor(p.queries.device, p.scale)
    options = "keep", None, None, None, p.memory
    return Problem(
        p.queries, p.candidates, None, None, scale, rows, *options, link=link, normalize=p.normalize
    )


def _copies(pairs: Problem) -> Copies:
    """The operands of products, which both directions and both walks share."""
    return Copies.of(pairs, room_for(pairs))


def _sums(pairs: Problem, norms: Norms, copies: Copies) -> Tensor:
    """What is known of each pair, (4, N) float64, from one walk over the scores.

    These are the logsumexp of its row and of its column, dL/dS of its own cell, and its loss.
    """
    sums_of_pairs = pairs.queries.new_empty(4, len(pairs.queries), dtype=torch.float64)

    transposed = replace(pairs, queries=pairs.candidates, candidates=pairs.queries)
    rows, columns = _both_ways((pairs, transposed), norms, copies, sums_of_pairs[:2], pairs=True)
    _sum_up(rows, columns)

    torch.add(rows.scores.cells.coefficients, columns.scores.cells.coefficients, out=sums_of_pairs[2])
    torch.add(rows.operands.loss, columns.operands.loss, out=sums_of_pairs[3])
    sums_of_pairs[2:].div_(2)
    return sums_of_pairs


def _pair_scores(p: ClipProblem, norms: Norms, copies: Copies) -> Tensor:
    """(pairs,) float64, in the precision of exact cells."""
    if p.pairs == 0:
        return p.queries.new_empty(0, dtype=torch.float64)
    scores = Scores(Operands(_pairs(p), 1.0, Needs(), copies), pairs=True, norms=norms)
    scores.choose_shifts()
    return positive_scores(scores.cells.scores.double())


def _both_ways(
    problems: Iterable[Problem],  # of rows, and of columns
    norms: Norms,
    copies: Copies,
    logsumexps: Iterable[Tensor],  # of rows and of columns, float64, to be found
    *,
    pairs: bool,  # whether the diagonal's cells are exact cells
) -> tuple[Softmax, Softmax]:
    """The softmaxes of rows and of columns, with the shifts that they begin with."""
    by_side = copies, copies.transposed()
    operands = (Operands(p, 1.0, Needs(), x) for p, x in zip(problems, by_side, strict=True))
    sides = norms, Norms(norms.candidates, norms.queries)
    rows, columns = (
        Softmax(o, Scores(o, pairs=pairs, logsumexp=logsumexp, norms=of_side))
        for o, logsumexp, of_side in zip(operands, logsumexps, sides, strict=True)
    )
    return rows, columns


def _sum_up(rows: Softmax, columns: Softmax) -> None:
    """Concludes all rows and columns, from one walk over the scores."""
    o, height = rows.operands, _chunk_rows(rows)
    column_shifts = columns.scores.state.row_shift_log2
    chunks = list(ranges(o.N, height))

    column_sums = column_shifts.new_empty(len(chunks), o.M)
    for chunk, chunk_sums in zip(chunks, column_sums, strict=True):
        _sum_chunk(rows, chunk, column_shifts, chunk_sums)

    for chunk in ranges(o.M, height):
        columns.conclude_rows(chunk, column_sums[:, chunk])


def _sum_chunk(rows: Softmax, chunk: slice, column_shifts: Tensor, column_sums: Tensor) -> None:
    """Concludes some rows, and writes their part of the sums of columns. Nothing is kept of tiles."""
    o, scores = rows.operands, rows.scores
    tile = scores.tile(o.blocks[0], chunk)
    tile_row_sums, _ = scores.tile_row_sums(chunk)
    tile_column_sums = tile_row_sums.new_empty(row_tiles(tile.rows, scores.config), o.M)

    row_and_column_scores(
        tile,
        o.copies.queries,
        o.scale,
        (scores.state.row_shift_log2, column_shifts),
        scores.config,
        tile_row_sums=tile_row_sums,
        tile_column_sums=tile_column_sums,
    )

    rows.conclude_rows(chunk, tile_row_sums)
    torch.sum(tile_column_sums, 0, out=column_sums)


def _chunk_rows(rows: Softmax) -> int:
    """Rows whose sums by tiles of columns, and the columns' by tiles of rows, are kept at once."""
    o, config = rows.operands, rows.scores.config
    line = 4 * (column_tiles(o.M, config) + row_tiles(o.M, config))
    return even_step(o.N, min(fitting(o.room, line), SUM_ROWS), config.rows)


def _gradients(
    pairs: Problem,
    norms: Norms,
    copies: Copies,
    sums: Tensor,
    weights: float | Tensor,
    needs: Needs,
) -> Gradients:
    operands = Operands(pairs, weights, needs, copies)
    # Of a cell's dL/dS each direction gives half.
    halves = operands.prob_scale / 2 * operands.weights / operands.weight_norm
    coefficients = torch.empty_like(halves, dtype=torch.float32)
    torch.mul(operands.weights, sums[2], out=coefficients)
    return _computed(_RowsAndColumns(operands, norms, *_shifted(sums[:2], halves), coefficients))


def _computed(link: _RowsAndColumns) -> Gradients:
    walks.run_cells(link)
    return link.operands.gradients()


def _shifted(logsumexp: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Shifts to base 2, and weights to which is given back what rounding took from the shifts; float32."""
    exact_log2 = logsumexp / math.log(2)
    shifts = exact_log2.float()
    return shifts, (weights * (shifts - exact_log2).exp2_()).float()


class _RowsAndColumns:
    """The link of CLIP's gradients, once the sums of both softmaxes are known."""

    def __init__(
        self,
        operands: Operands,  # of the problem whose targets are the pairs
        norms: Norms,  # of that problem
        shifts: Iterable[Tensor],  # those of rows (N,) and of columns (M,) to base 2, float32
        weights: Iterable[Tensor],  # what their exponentials are multiplied by, float32
        coefficients: Tensor,  # dL/dS of the pairs, (pairs,) float32
    ) -> None:
        self.operands = operands
        self.scores = Scores(operands, pairs=len(coefficients) > 0, norms=norms, both_ways=True)
        # The targets of pairs are known, so that no kernel has to look at them.
        _, columns, _ = operands.p.targets.compressed()
        self.scores.cells = replace(self.scores.cells, columns=columns, coefficients=coefficients)
        self.row_shift_log2, self.column_shift_log2 = shifts
        self.row_weights, self.column_weights = weights
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
            tile,
            o.copies.queries,
            o.scale,
            (self.row_shift_log2, self.column_shift_log2[columns]),
            self.scores.config,
            factors=(self.row_weights, self.column_weights[columns]),
            total=out,
        )

    def conclude(self, rows: slice, tile_row_sums: Tensor, product: Tensor | None) -> None:
        """There is nothing left to find."""

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E, which holds the weights."""
        self.fill(tile, out, None, None)
