"""CLIP's loss on a GPU: a softmax over each row of the scores and one over each column.

A first walk sums the exponentials of rows and of columns together. After it no cell depends on others, as
with a sigmoid: in the second walk a cell's two probabilities are added up. The pairs, on the diagonal, are
the exact cells of both softmaxes.

Where the scores are few, the first walk keeps them, in float32, and the second reads them: three products.
Otherwise none is stored, and the second walk makes them once more: four. Exponentials could not be kept in
place of scores: their shift is that of a row, with which the largest cell of a column may be 0.

A rectangle of the scores has the same two walks. The sums of its first walk lack the pairs, which the caller
adds to those of all rectangles. Of several multiples of the scores each has softmaxes of its own, which share
the products where the scores are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from fastqt.devices import on_gpu
from fastqt.engines.reference import clip as reference_clip
from fastqt.engines.reference.contrastive import check_targets
from fastqt.engines.triton import contrastive, walks
from fastqt.engines.triton.copies import Copies
from fastqt.engines.triton.free_memory import asked_again_if_none_is_left
from fastqt.engines.triton.loop import SUM_ROWS
from fastqt.engines.triton.operands import (
    Operands,
    aligned,
    fast_bytes,
    fitting,
    ranges,
    room_for,
    scale_tensor,
    weighted_sum,
)
from fastqt.engines.triton.scores import Norms, Scores
from fastqt.engines.triton.softmax import Softmax
from fastqt.kernels.scores import (
    KEPT,
    Tile,
    column_tiles,
    kept_row_and_column_scores,
    row_and_column_scores,
    row_tiles,
)
from fastqt.problem import (
    ClipProblem,
    ClipSide,
    ClipSums,
    Gradients,
    Inputs,
    Needs,
    Problem,
    Rows,
    check_scale_of_thresholds,
    positive_scores,
)
from fastqt.steps import even_step
from fastqt.targets import Diagonal, NoTargets, Targets

Pairs = TypeVar("Pairs", ClipProblem, Problem)

# Columns of embeddings from which a product takes longer than to write its scores and to read them, 8 bytes a
# cell: by the data sheets 530 (A100) to 750 (B200) in 16 bits, and half of that in TF32.
LEAST_WIDTH = {torch.bfloat16: 640, torch.float16: 640, torch.float32: 320}


def gradients_in_forward(p: ClipProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


@asked_again_if_none_is_left
def forward(p: ClipProblem) -> Rows:
    """The loss of each pair; saved are the logsumexps of its row and column, and dL/dS of its own cell."""
    return _forward(p, _room_for_scores(p) if p.leave_apart else None)


@asked_again_if_none_is_left
def forward_for_backward(p: ClipProblem) -> Rows:
    """The same; where the scores are few, they are saved as well."""
    return _forward(p, _room_for_scores(p))


def _forward(p: ClipProblem, kept: Tensor | None) -> Rows:
    pairs = _pairs(p)
    sums_of_pairs, _ = _sums(p, pairs, Norms.of(pairs), _copies(pairs), kept)
    saved = sums_of_pairs[:3]
    return Rows(sums_of_pairs[3], (saved,) if kept is None else (saved, kept))


@asked_again_if_none_is_left
def forward_with_gradients(p: ClipProblem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    pairs, kept = _pairs(p), _room_for_scores(p)
    norms, copies = Norms.of(pairs), _copies(pairs)
    sums_of_pairs, masks = _sums(p, pairs, norms, copies, kept)
    return weighted_sum(sums_of_pairs[3], row_weight), _gradients(
        pairs, norms, copies, sums_of_pairs[:3], row_weight, needs, kept, masks
    )


@asked_again_if_none_is_left
def backward(p: ClipProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from what `forward` found."""
    sums, *kept = saved
    pairs = _pairs(p)
    scores = kept[0] if kept else None
    masks = None if scores is None else _masks(p, scores)
    return _gradients(pairs, Norms.of(pairs), _copies(pairs), sums, row_weights, needs, scores, masks)


@asked_again_if_none_is_left
def sums(p: ClipProblem) -> ClipSums:
    """The score of each pair of a rectangle, and the logsumexps of all other cells."""
    if not p.has_cells:
        return reference_clip.sums(p)

    K = len(p.multiples)
    pairs = _pairs(p)
    norms, copies = Norms.of(pairs), _copies(pairs)
    kept = _room_for_scores(p) if p.keeps or K > 1 else None
    row_others, column_others = (
        p.queries.new_empty(K, len(x), dtype=torch.float64) for x in (p.queries, p.candidates)
    )

    for k, multiple in enumerate(p.multiples):
        side = replace(p, scale=multiple * p.scale)
        problems = (_problem(x, NoTargets(), "log_sum_exp") for x in (side, _transposed(side)))
        logsumexps = row_others[k], column_others[k]
        both = _both_ways(problems, norms, copies, logsumexps, pairs=p.pairs != 0)
        if k == 0 or kept is None:
            _sum_up(*both, kept)
        else:
            _sum_up_kept(*both, kept, _relative(p)[k : k + 1])

    p.kept = kept if p.keeps else None
    return ClipSums(_pair_scores(p, norms, copies), row_others.squeeze(0), column_others.squeeze(0))


@asked_again_if_none_is_left
def gradients_from(
    p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
) -> Gradients:
    """The gradients of a rectangle, of which dL/dS is `pairs` at the pairs and the sides' elsewhere."""
    if not p.has_cells:
        return reference_clip.gradients_from(p, rows, columns, pairs, needs)
    if len(p.multiples) > 1 and p.kept is None:
        return _gradients_of_each(p, rows, columns, pairs, needs)

    problem = _pairs(p)
    # What a side's multiples give dL/dS, which is that of the score itself.
    multiples = torch.stack([scale_tensor(problem.queries.device, x).double() for x in p.multiples])
    sides = [(x.logsumexp.view(len(multiples), -1), x.weights * multiples[:, None]) for x in (rows, columns)]
    # No cell's dL/dS is larger than this, so that divided by it all of them fit float16.
    largest = torch.stack([weights.abs().amax(1) for _, weights in sides]).sum()
    operands = Operands(problem, largest.expand(len(p.queries)), needs, kept=p.kept)

    prob_scale, norm = operands.prob_scale, operands.weight_norm
    shifts, weights = zip(*(_shifted(x, prob_scale * of_side / norm) for x, of_side in sides), strict=True)
    relative = _relative(p) if len(multiples) > 1 else None
    norms = Norms.of(problem)
    return _computed(
        _RowsAndColumns(operands, norms, shifts, weights, pairs.float(), kept=p.kept, multiples=relative)
    )


def _gradients_of_each(
    p: ClipProblem, rows: ClipSide, columns: ClipSide, pairs: Tensor, needs: Needs
) -> Gradients:
    """Those of several multiples of the scores, each from products of its own."""
    sums: Gradients = Inputs()
    for k, multiple in enumerate(p.multiples):
        each = replace(p, scale=multiple * p.scale, multiples=(1.0,))
        of_rows, of_columns = (ClipSide(x.logsumexp[k], x.weights[k]) for x in (rows, columns))
        of_pairs = pairs / multiple if k == 0 else torch.zeros_like(pairs)
        part: Gradients = gradients_from(each, of_rows, of_columns, of_pairs, needs)
        if part.scale is not None:
            part = part._replace(scale=multiple * part.scale)
        sums = part if k == 0 else Inputs(*map(_added, sums, part))
    return sums


def _added(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return x if x is None or y is None else x + y


def _relative(p: ClipProblem) -> Tensor:
    """(multiples,) float32: those of the scores that are kept, which are the first ones times a number."""
    first, device = p.multiples[0], p.queries.device
    return torch.stack([scale_tensor(device, multiple / first) for multiple in p.multiples])


def _room_for_scores(p: ClipProblem) -> Tensor | None:
    """(N, width) float32 for the scores of all rows; None where they are to be made again."""
    (N, D), M = p.queries.shape, p.candidates.shape[0]
    width = aligned(M)
    few = 4 * N * width <= min(contrastive.KEPT_BYTES, fast_bytes(p.queries) // 2)
    # A product of several multiples is saved more than once.
    pays = len(p.multiples) > 1 or LEAST_WIDTH[p.queries.dtype] <= D
    # Whoever lets other cells leave rows than columns has seen to it that the scores are few.
    keeps = p.leave_apart or (p.memory == "fast" and few and pays)
    return p.queries.new_empty(N, width, dtype=torch.float32) if keeps else None


def _pairs(p: ClipProblem) -> Problem:
    """The softmax over rows, whose targets are the pairs; of all cells if others leave those of columns."""
    if p.leave_apart:
        p = replace(p, mask=None)
    return _problem(p, NoTargets() if p.pairs == 0 else Diagonal())


def _problem(p: ClipProblem, targets: Targets, link: str = "softmax") -> Problem:
    rows = targets.rows(len(p.queries), len(p.candidates), p.queries.device)
    scale = scale_tensor(p.queries.device, p.scale)
    options = "keep", None, None, p.mask, p.memory
    problem = Problem(
        p.queries, p.candidates, None, None, scale, rows, *options, link=link, normalize=p.normalize
    )
    if p.mask is not None and not on_gpu(p.queries):  # On a GPU a kernel asserts that no pair leaves.
        check_targets(problem)
    return problem


def _transposed(p: Pairs) -> Pairs:
    """The problem of columns."""
    mask = None if p.mask is None else p.mask.T
    return replace(p, queries=p.candidates, candidates=p.queries, mask=mask)


def _copies(pairs: Problem) -> Copies:
    """The operands of products, which both directions and both walks share."""
    return Copies.of(pairs, room_for(pairs))


def _sums(
    p: ClipProblem, pairs: Problem, norms: Norms, copies: Copies, kept: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """What is known of each pair, (4, N) float64, from one walk over the scores, which may be kept.

    These are the logsumexp of its row and of its column, dL/dS of its own cell, and its loss. With them come
    the masks of rows and of columns if these are not the same.
    """
    sums_of_pairs = pairs.queries.new_empty(4, len(pairs.queries), dtype=torch.float64)

    masks = None
    if kept is not None and p.leave_apart:
        _fill_scores(pairs, norms, copies, kept)
        masks = _masks(p, kept)
    problems = (pairs, _transposed(pairs)) if masks is None else _masked(pairs, masks)

    rows, columns = _both_ways(problems, norms, copies, sums_of_pairs[:2], pairs=True)
    if kept is None or masks is None:
        _sum_up(rows, columns, kept)
    else:
        _sum_up_kept(rows, columns, kept, None, masks)

    torch.add(rows.scores.cells.coefficients, columns.scores.cells.coefficients, out=sums_of_pairs[2])
    torch.add(rows.operands.loss, columns.operands.loss, out=sums_of_pairs[3])
    sums_of_pairs[2:].div_(2)
    return sums_of_pairs, masks


def _fill_scores(pairs: Problem, norms: Norms, copies: Copies, kept: Tensor) -> None:
    """Writes all scores, -inf at the pairs, and nothing else."""
    o = Operands(pairs, 1.0, Needs(), copies)
    scores = Scores(o, pairs=True, norms=norms)
    row_and_column_scores(
        scores.tile(o.blocks[0], slice(0, o.N)),
        copies.queries,
        o.scale,
        2 * (scores.state.row_shift_log2.zero_(),),
        scores.config,
        scores=kept[:, : o.M],
    )


def _masks(p: ClipProblem, kept: Tensor) -> tuple[Tensor, Tensor] | None:
    """(N, M) bool each: the cells that leave softmaxes of rows and of columns; None if these are the same."""
    if not p.leave_apart:
        return None
    scores, column_mask = kept[:, : len(p.candidates)], p.mask if p.column_mask is None else p.column_mask
    if p.thresholds is None:
        assert p.mask is not None
        assert column_mask is not None
        return p.mask, column_mask

    check_scale_of_thresholds(p)
    # The scores are similarities times the scale, which is positive, to base 2; those of pairs are -inf.
    thresholds = (p.thresholds * (scale_tensor(kept.device, p.scale) / math.log(2))).float()
    of_rows, of_columns = scores > thresholds[:, None], scores > thresholds
    if p.mask is not None and column_mask is not None:
        of_rows |= p.mask
        of_columns |= column_mask
    return of_rows, of_columns


def _masked(pairs: Problem, masks: tuple[Tensor, Tensor]) -> tuple[Problem, Problem]:
    """The problems of rows and of columns."""
    of_rows, of_columns = masks
    return replace(pairs, mask=of_rows), _transposed(replace(pairs, mask=of_columns))


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


def _sum_up(rows: Softmax, columns: Softmax, kept: Tensor | None) -> None:
    """Concludes all rows and columns, from one walk over the scores, which fills what is to be kept."""
    o, height = rows.operands, _chunk_rows(rows)
    column_shifts = columns.scores.state.row_shift_log2
    chunks = list(ranges(o.N, height))

    column_sums = column_shifts.new_empty(len(chunks), o.M)
    for chunk, chunk_sums in zip(chunks, column_sums, strict=True):
        _sum_chunk(rows, chunk, column_shifts, chunk_sums, kept)

    for chunk in ranges(o.M, height):
        columns.conclude_rows(chunk, column_sums[:, chunk])


def _sum_chunk(
    rows: Softmax, chunk: slice, column_shifts: Tensor, column_sums: Tensor, kept: Tensor | None
) -> None:
    """Concludes some rows, and writes their part of the sums of columns."""
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
        scores=None if kept is None else kept[chunk, : o.M],
        tile_row_sums=tile_row_sums,
        tile_column_sums=tile_column_sums,
    )

    rows.conclude_rows(chunk, tile_row_sums)
    torch.sum(tile_column_sums, 0, out=column_sums)


def _sum_up_kept(
    rows: Softmax,
    columns: Softmax,
    kept: Tensor,
    multiple: Tensor | None,  # (1,), of what is kept
    masks: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Concludes all rows and columns from scores that are kept."""
    o = rows.operands
    every = slice(0, o.N)
    tile_row_sums = kept.new_empty(column_tiles(o.M, KEPT), o.N)
    tile_column_sums = kept.new_empty(row_tiles(o.N, KEPT), o.M)
    kept_row_and_column_scores(
        rows.scores.tile(o.blocks[0], every),
        kept[:, : o.M],
        (rows.scores.state.row_shift_log2[None], columns.scores.state.row_shift_log2[None]),
        multiples=multiple,
        masks=masks,
        tile_row_sums=tile_row_sums,
        tile_column_sums=tile_column_sums,
    )
    rows.conclude_rows(every, tile_row_sums)
    columns.conclude_rows(slice(0, o.M), tile_column_sums)


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
    kept: Tensor | None,
    masks: tuple[Tensor, Tensor] | None,
) -> Gradients:
    operands = Operands(pairs, weights, needs, copies, kept=kept)
    # Of a cell's dL/dS each direction gives half.
    halves = operands.prob_scale / 2 * operands.weights / operands.weight_norm
    coefficients = torch.empty_like(halves, dtype=torch.float32)
    torch.mul(operands.weights, sums[2], out=coefficients)
    shifts, factors = _shifted(sums[:2], halves)
    sides = shifts[:, None], factors[:, None]
    return _computed(_RowsAndColumns(operands, norms, *sides, coefficients, kept=kept, masks=masks))


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
        shifts: Iterable[Tensor],  # (multiples, N) of rows, (multiples, M) of columns; to base 2, float32
        weights: Iterable[Tensor],  # what their exponentials are multiplied by, float32
        coefficients: Tensor,  # dL/dS of the pairs, (pairs,) float32
        *,
        kept: Tensor | None = None,  # (N, at least M) float32: the scores; None: one multiple is made again
        multiples: Tensor | None = None,  # (multiples,) float32, of the scores; None: one, of 1
        masks: tuple[Tensor, Tensor] | None = None,  # (N, M) bool: cells of `kept` that leave rows, columns
    ) -> None:
        self.operands, self.kept, self.multiples, self.masks = operands, kept, multiples, masks
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
        rows = slice(tile.first_row, tile.first_row + tile.rows)
        columns = slice(tile.first_column, tile.first_column + tile.candidates.shape[0])
        shifts = self.row_shift_log2, self.column_shift_log2[:, columns]
        factors = self.row_weights, self.column_weights[:, columns]

        if self.kept is not None:
            masks = self.masks
            if masks is not None:
                masks = masks[0][rows, columns], masks[1][rows, columns]
            kept_row_and_column_scores(
                tile,
                self.kept[rows, columns],
                shifts,
                multiples=self.multiples,
                masks=masks,
                factors=factors,
                total=out,
            )
            return

        of_rows, of_columns = shifts
        row_and_column_scores(
            tile,
            o.copies.queries,
            o.scale,
            (of_rows[0], of_columns[0]),
            self.scores.config,
            factors=(factors[0][0], factors[1][0]),
            total=out,
        )

    def conclude(self, rows: slice, tile_row_sums: Tensor, product: Tensor | None) -> None:
        """There is nothing left to find."""

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E, which holds the weights."""
        self.fill(tile, out, None, None)
