"""The softmax of each row: E is exp(S - shift), from the epilogue of the scores' product.

A row's shift need not be its maximum. float32 and bfloat16 have range to spare, and a row whose shift was too
far off is found by its sum and computed again. Row factors scale F before the dG product, and dF after its
own, so that E is written once and never rescaled.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.engines.triton.operands import Operands, aligned
from fastqt.engines.triton.scores import Scores
from fastqt.kernels.row_products import multiply_overflowed_rows
from fastqt.kernels.row_stats import row_stats
from fastqt.kernels.scores import Tile, column_tiles, exp_scores, max_scores
from fastqt.kernels.tuning import sample_config

SAMPLE = 256  # candidates whose scores help to choose the shifts


class Kept(NamedTuple):
    """What a forward pass has left of all rows. Those whose shift was too far off are computed again."""

    exponentials: Tensor  # (N, width): E
    tile_row_sums: Tensor  # (tiles, N) float32


class Softmax:
    """The link of `contrastive_loss` and of `log_sum_exp`."""

    def __init__(self, operands: Operands, scores: Scores | None = None, *, kept: Kept | None = None) -> None:
        self.operands, self.kept = operands, kept
        self.scores = scores or Scores(operands)
        self.scores.choose_shifts(_sampled_maxima(self.scores))

    @property
    def exponentials(self) -> Tensor | None:
        return None if self.kept is None else self.kept.exponentials

    def whole_rows(self, rows: slice, E: Tensor | None) -> None:
        """Concludes some rows, and fills E, if given, with all their columns."""
        o, scores = self.operands, self.scores
        if E is not None and o.prob_scale != 1:
            # float16 has too little range for a rough shift, so the logsumexp is found first.
            self.whole_rows(rows, None)
            self._shift_by_logsumexp(rows)
            for block in o.blocks:
                self._exp(scores.tile(block, rows), E[:, block.columns])
            return
        sums = self._fill_rows(rows, E) if self.kept is None else self.kept.tile_row_sums[:, rows]
        self.conclude_rows(rows, sums, E)

    def whole_matrix(self) -> Kept:
        """Concludes all rows, with what a backward pass may keep of them; not of float16."""
        o = self.operands
        rows, E = slice(0, o.N), o.p.queries.new_empty(o.N, aligned(o.width))
        sums = self._fill_rows(rows, E)
        self.conclude_rows(rows, sums, E)
        return Kept(E, sums)

    def _fill_rows(self, rows: slice, E: Tensor | None) -> Tensor:
        """Fills E, if given, and returns the sums of the rows by tiles."""
        o, scores = self.operands, self.scores
        sums, parts = scores.tile_row_sums(rows)
        for block, part in zip(o.blocks, parts, strict=True):
            out = None if E is None else E[:, block.columns]
            self._exp(scores.tile(block, rows), out, tile_row_sums=part)
        return sums

    def begin(self, rows: slice) -> None:
        """Finds the shifts of some rows of float16 from their logsumexp."""
        if self.operands.prob_scale != 1:
            self.whole_rows(rows, None)
            self._shift_by_logsumexp(rows)

    def fill(
        self, tile: Tile, out: Tensor | None, tile_row_sums: Tensor | None, tile_column_sums: Tensor | None
    ) -> None:
        """Fills a tile of E, and its sums of rows, which are known of float16. Columns need the weights."""
        known = self.operands.prob_scale != 1
        self._exp(tile, out, tile_row_sums=None if known else tile_row_sums)

    def conclude(self, rows: slice, tile_row_sums: Tensor, product: Tensor | None) -> None:
        """Concludes some rows from their sums by tiles, and those again whose shift was too far off."""
        o, scores = self.operands, self.scores
        if o.prob_scale != 1:
            return
        self.conclude_rows(rows, tile_row_sums)
        if product is not None:
            for block in o.blocks:
                tile, add = scores.tile(block, rows), block.first > 0
                multiply_overflowed_rows(tile, o.copies.queries, o.scale, scores.state, product, add=add)

    def conclude_rows(self, rows: slice, tile_row_sums: Tensor, E: Tensor | None = None) -> None:
        """Concludes some rows from their sums by tiles.

        Those whose shift was too far off are computed again, against their true maximum, in E too.
        """
        o, scores = self.operands, self.scores
        tiles = [scores.tile(block, rows) for block in o.blocks]
        row_stats(tile_row_sums, tiles, o.copies.queries, o.scale, scores.cells, scores.state, E)

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E times its rows' factors, once the rows are concluded."""
        self._exp(tile, out, factors=self._factors, tile_column_sums=tile_column_sums)

    def column_weights(self, rows: slice) -> Tensor:
        """What some concluded rows of E are multiplied by in sums over columns, float32."""
        weights: Tensor = (
            self.operands.prob_scale * self.scores.state.factors[rows] / self.operands.weight_norm
        )
        return weights.float()

    @functools.cached_property
    def _factors(self) -> Tensor:
        """The weights of all rows, (N,), to be read once all of them are concluded."""
        return self.column_weights(slice(None))

    def _exp(
        self,
        tile: Tile,
        out: Tensor | None,
        *,
        factors: Tensor | None = None,
        tile_row_sums: Tensor | None = None,
        tile_column_sums: Tensor | None = None,
    ) -> None:
        o, scores = self.operands, self.scores
        exp_scores(
            tile,
            o.copies.queries,
            o.scale,
            scores.state.row_shift_log2,
            scores.config,
            exponentials=out,
            factors=factors,
            tile_row_sums=tile_row_sums,
            tile_column_sums=tile_column_sums,
        )

    def _shift_by_logsumexp(self, rows: slice) -> None:
        state, prob_scale = self.scores.state, self.operands.prob_scale
        logsumexp, mass = state.logsumexp[rows], state.mass[rows]
        shift_log2 = ((logsumexp - math.log(prob_scale)) / math.log(2)).float()
        state.row_shift_log2[rows] = shift_log2.where(mass > 0, math.inf)
        sums = (logsumexp - math.log(2) * shift_log2.double()).exp()
        has_gradient = (mass > 0) & ~logsumexp.isneginf()
        state.factors[rows] = (state.weights[rows] * mass / sums).where(has_gradient, 0)


def _sampled_maxima(scores: Scores) -> Tensor | None:
    """Each row's maxima over tiles of a sample, (tiles, N) to base 2; None where candidates are few."""
    o, p = scores.operands, scores.operands.p
    if o.M <= 4 * SAMPLE:
        return None

    every = slice(None, SAMPLE * (o.M // SAMPLE), o.M // SAMPLE)
    bias = None if p.bias is None else p.bias[every].contiguous()
    config = sample_config(scores.config)
    maxima = p.queries.new_empty(column_tiles(SAMPLE, config), o.N, dtype=torch.float32)

    of_queries, of_sample = scores.norms.of_pair(o.blocks[0], every)
    tile = Tile(
        0,
        o.N,
        o.copies.candidates[every],
        bias=bias,
        query_inverse_norms=of_queries,
        candidate_inverse_norms=None if of_sample is None else of_sample.contiguous(),
        thresholds=p.thresholds,
        rounded=o.copies.rounded,
    )
    max_scores(tile, o.copies.queries, o.scale, maxima, config)
    return maxima
