"""The walk that never writes a score: their product takes the exponential in its epilogue.

A chunk of whole rows of E = exp(S - r) is kept in the inputs' dtype, and three matrix
products make the gradients: the scores with the exponential in their epilogue, dF = E G and
dG = Eᵀ F. What is particular to a row (its sum, its weight) rides on the rows of F and dF,
so E is written once and never rescaled. The reference r need not be the maximum: float32
and bfloat16 have range to spare, and a row that needed more is found and done again.

memory="low" takes dF from chunks of whole rows, then dG from chunks of columns and tiles of these,
with the scores taken once more for the second: 8 N M D instead of 6. Until it is written, dG's own
memory holds the chunk of rows.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fastqt.engines.triton.walk import (
    ROW_MULTIPLE,
    TARGETS_WANTED,
    Block,
    Walk,
    aligned,
    even,
    fitting,
    multiply,
    ranges,
)
from fastqt.kernels.cells import ExactCells, RowNegatives, RowState
from fastqt.kernels.gradients import (
    bias_gradient_epilogue,
    candidate_gradient_epilogue,
    query_gradient_epilogue,
)
from fastqt.kernels.launch import multiprocessors
from fastqt.kernels.row_shifts import choose_row_shifts, raise_row_shifts
from fastqt.kernels.row_stats import row_stats
from fastqt.kernels.scores import Tile, column_tiles, exp_scores, max_scores, row_tiles
from fastqt.kernels.tuning import score_config
from fastqt.problem import Needs, Problem

SUM_ROWS = 8192  # whose partial sums are kept at a time when nothing else is
SAMPLE = 256  # candidates whose scores help to choose references


class FusedWalk(Walk):
    """Scores with the exponential in their product's epilogue; targets one by one."""

    def __init__(self, p: Problem, weights: float | Tensor, needs: Needs) -> None:
        super().__init__(p, weights, needs)
        shape = self.N, self.width, self.D
        heavy = p.mask is not None or p.link == "sigmoid"
        self.config = score_config(p.queries.device, p.queries.dtype, *shape, heavy)
        self.groups = _numbered(p.query_groups, p.candidate_groups)
        self.cells = self._exact_cells()
        self.state = self._row_state()
        self.column_sums = None
        if self.needs.bias:
            self.column_sums = p.queries.new_zeros(self.M, dtype=torch.float32)
        self.prepare()

    def run(self) -> None:
        if not self.differentiates:
            for rows in ranges(self.N, SUM_ROWS):
                self.sum_rows(rows)
        elif self.fits_in_one_walk:
            self.all_at_once()
        else:
            self.rows_then_columns()
        if self.bias_gradient is not None and self.column_sums is not None:
            bias_gradient_epilogue(
                *(self.column_sums, self.weight_norm, self.prob_scale, self._targets_by_column),
                *(self.cells.coefficients, self.bias_gradient),
            )

    @property
    def fits_in_one_walk(self) -> bool:
        return self.p.memory == "fast"

    def _exact_cells(self) -> ExactCells:
        p = self.p
        starts, columns, weights = p.targets.compressed()
        new = p.queries.new_empty
        row_negatives = None
        if p.row_negatives is not None or p.partners is not None:
            matrix = p.candidates if p.row_negatives is None else p.row_negatives
            found = (new(self.N, dtype=torch.float32) for _ in range(3))
            row_negatives = RowNegatives(matrix, *found, p.partners, p.mix)
        return ExactCells(
            starts,
            weights,
            *(torch.empty_like(columns) for _ in range(2)),
            *(new(columns.shape, dtype=torch.float32) for _ in range(2)),
            *(new(self.N, dtype=torch.int32) for _ in range(2)),
            sound=new(self.N, dtype=torch.bool),
            zeroed=new(self.N, dtype=torch.bool) if p.diagonal == "zero" else None,
            row_negatives=row_negatives,
        )

    def _row_state(self) -> RowState:
        new, N = self.p.queries.new_empty, self.N
        return RowState(
            weights=self.weights,
            exact_max_log2=new(N, dtype=torch.float32),
            row_shift_log2=new(N, dtype=torch.float32),
            shift_overflowed=new(N, dtype=torch.int32),
            factors=new(N, dtype=torch.float64),
            logsumexp=self.logsumexp,
            mass=self.mass,
            loss=self.loss,
        )

    def prepare(self) -> None:
        """Scores of the exact cells, and what exponentials are taken against."""
        p, sampled = self.p, None
        if self.M > 4 * SAMPLE:
            every = slice(None, SAMPLE * (self.M // SAMPLE), self.M // SAMPLE)
            bias = None if p.bias is None else p.bias[every].contiguous()
            sample = Tile(0, self.N, p.candidates[every], bias=bias)
            maxima = self._partial(SAMPLE, self.N)
            max_scores(sample, p.queries, self.scale, maxima, self.config)
            sampled = maxima.amax(0)
        self.look_at_rows(sampled)

    def look_at_rows(self, sampled: Tensor | None = None) -> None:
        """Exact cells and row shifts; on a GPU, which has not looked at the targets yet, an assertion too."""
        choose_row_shifts(self.p, self.scale, self.groups, self.cells, self.state, sampled)
        if self.p.queries.is_cuda:
            torch._assert_async(self.cells.sound.all(), TARGETS_WANTED)

    def _partial(self, columns: int, rows: int) -> Tensor:
        return self.p.queries.new_empty(column_tiles(columns, self.config), rows, dtype=torch.float32)

    def tile(self, block: Block, rows: slice, columns: slice | None = None) -> Tile:
        """Some rows of E against a block, or against some of its columns."""
        p, height = self.p, rows.stop - rows.start
        columns = columns or slice(0, block.matrix.shape[0])
        if block.first:
            return Tile(rows.start, height, block.matrix[columns])
        return Tile(
            rows.start,
            height,
            block.matrix[columns],
            columns.start,
            p.diagonal != "keep",
            *(self.cells.starts, self.cells.columns, self.cells.lowest, self.cells.highest),
            *self.groups,
            p.mask,
            None if p.bias is None else p.bias[columns],
        )

    def sum_rows(self, rows: slice, E: Tensor | None = None) -> None:
        """Finds all that is known of some rows, and writes their E where it is given."""
        if E is not None and self.prob_scale != 1:
            self.sum_rows(rows)
            self._refer_to_logsumexp(rows)
            for block in self.blocks:
                self.fill(self.tile(block, rows), E[:, block.columns])
            return
        self._add_up(rows, E, None)
        self.repair(rows, E)

    def _add_up(self, rows: slice, E: Tensor | None, shift_overflowed: tuple[Tensor, Tensor] | None) -> None:
        tile_row_sums, parts = self._parts_of_blocks(rows)
        for block, part in zip(self.blocks, parts, strict=True):
            of_block = None if E is None else E[:, block.columns]
            self.fill(self.tile(block, rows), of_block, tile_row_sums=part, shift_overflowed=shift_overflowed)
        row_stats(
            tile_row_sums, self.cells, self.state, rows.start, only_overflowed=shift_overflowed is not None
        )

    def repair(self, rows: slice, E: Tensor | None = None) -> None:
        """Does those rows again whose reference was too far off."""
        shift_overflowed = self.state.shift_overflowed, self.state.shift_overflowed[rows].amax()
        maxima, parts = self._parts_of_blocks(rows)
        for block, part in zip(self.blocks, parts, strict=True):
            max_scores(
                self.tile(block, rows),
                self.p.queries,
                self.scale,
                part,
                self.config,
                shift_overflowed=shift_overflowed,
            )
        raise_row_shifts(self.state, maxima, rows.start)
        self._add_up(rows, E, shift_overflowed)

    def _parts_of_blocks(self, rows: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Room for the sums of some rows over blocks of columns, and each block's part of it."""
        sizes = [column_tiles(block.matrix.shape[0], self.config) for block in self.blocks]
        tile_row_sums = self.p.queries.new_empty(sum(sizes), rows.stop - rows.start, dtype=torch.float32)
        return tile_row_sums, tile_row_sums.split(sizes)

    def fill(
        self,
        tile: Tile,
        out: Tensor | None,
        *,
        tile_row_sums: Tensor | None = None,
        factors: Tensor | None = None,
        tile_column_sums: Tensor | None = None,
        shift_overflowed: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """E of a tile, and its sums."""
        exp_scores(
            *(tile, self.p.queries, self.scale, self.state.row_shift_log2, self.config),
            exponentials=out,
            factors=factors,
            tile_row_sums=tile_row_sums,
            tile_column_sums=tile_column_sums,
            shift_overflowed=shift_overflowed,
        )

    def _refer_to_logsumexp(self, rows: slice) -> None:
        state = self.state
        logsumexp, mass = state.logsumexp[rows], state.mass[rows]
        row_shift_log2 = ((logsumexp - math.log(self.prob_scale)) / math.log(2)).float()
        state.row_shift_log2[rows] = row_shift_log2.where(mass > 0, math.inf)
        sums = (logsumexp - math.log(2) * row_shift_log2.double()).exp()
        state.factors[rows] = (state.weights[rows] * mass / sums).where(mass > 0, 0)

    def weights_in_columns(self) -> Tensor:
        """What E's rows are to be multiplied by for its columns to add up to gradients, (N,) float32."""
        weights: Tensor = self.prob_scale * self.state.factors / self.weight_norm
        return weights.float()

    def all_at_once(self) -> None:
        """All gradients from one walk over chunks of whole rows."""
        itemsize = self.p.queries.element_size()
        row_bytes = itemsize * aligned(self.width) + (4 + itemsize) * self.D
        height = self.fitting_rows(row_bytes)
        E = self.p.queries.new_empty(height, aligned(self.width))
        self.make_products()
        weighted = None
        if any(block.gradient is not None for block in self.blocks):
            weighted = self.p.queries.new_empty(height, self.D)
        for rows in ranges(self.N, height):
            n = rows.stop - rows.start
            self.sum_rows(rows, E[:n])
            self._finish_queries(rows, self._times_columns(E[:n]), weighted)
            for block in self.blocks:
                if block.product is not None and weighted is not None:
                    multiply(block.product, E[:n, block.columns].T, weighted[:n], add=rows.start > 0)
            if self.column_sums is not None:
                weights = self.weights_in_columns()[rows].to(E.dtype)
                multiply(self.column_sums[None], weights[None], E[:n, : self.M], add=True)
        for block in self.blocks:
            self._finish_candidates(block, slice(0, block.matrix.shape[0]), block.product)

    def rows_then_columns(self) -> None:
        """dF from chunks of rows, then dG from chunks of columns: neither is kept in float32."""
        p = self.p
        E = self._rows_at_once()
        for rows in ranges(self.N, len(E)):
            self.sum_rows(rows, E[: rows.stop - rows.start])
            self._finish_queries(rows, self._times_columns(E[: rows.stop - rows.start]), None)
        del E
        factors = self.weights_in_columns()
        for block in self.blocks:
            sums = self.column_sums if block.first == 0 else None
            if block.gradient is None and sums is None:
                continue
            height, length = self._tile_of_columns(block)
            E = p.queries.new_empty(height, length)
            for columns in ranges(block.matrix.shape[0], length):
                product = None
                if block.gradient is not None:
                    product = p.queries.new_empty(columns.stop - columns.start, self.D, dtype=torch.float32)
                for rows in ranges(self.N, height):
                    part = E[: rows.stop - rows.start, : columns.stop - columns.start]
                    tile = self.tile(block, rows, columns)
                    with self._column_sums(tile) as tile_column_sums:
                        self.fill(tile, part, factors=factors, tile_column_sums=tile_column_sums)
                    if product is not None:
                        multiply(product, part.T, p.queries[rows], add=rows.start > 0)
                self._finish_candidates(block, columns, product)

    def _rows_at_once(self) -> Tensor:
        """Room for whole rows of E, (rows, width): the memory of a gradient to come where that is more."""
        itemsize = self.p.queries.element_size()
        later = [b.gradient.view(-1) for b in self.blocks if b.gradient is not None]
        memory = max(later, key=len, default=None)
        if memory is None or len(memory) * itemsize < self.room:
            memory = self.p.queries.new_empty(self.room // itemsize)
        width = aligned(self.width)
        height = min(fitting(len(memory), width), self.N)
        if height * width > len(memory):  # the least of rows at once
            return memory.new_empty(height, width)
        return memory[: height * width].view(height, width)

    def _tile_of_columns(self, block: Block) -> tuple[int, int]:
        """Rows and columns of E in the room, beside a sum over rows for each of the columns."""
        queries, columns = self.p.queries, block.matrix.shape[0]
        itemsize = queries.element_size()
        # Tiles of 128 x 256, as the vendor cuts the product, then fill all multiprocessors once.
        one_wave = 128 * max(multiprocessors(queries) // math.ceil(self.D / 256), 1)
        length = min(one_wave, fitting(self.room // 2, 4 * self.D), aligned(columns))
        height = fitting(self.room - 4 * self.D * length, itemsize * length)
        return even(self.N, min(height, self.N), ROW_MULTIPLE), length

    @contextlib.contextmanager
    def _column_sums(self, tile: Tile) -> Iterator[Tensor | None]:
        """Room for the sums of a tile's columns, if they are wanted; then adds these up."""
        if self.column_sums is None or tile.target_starts is None:  # negatives have no biases
            yield None
            return
        columns = tile.candidates.shape[0]
        tile_row_sums = self.column_sums.new_empty(row_tiles(tile.rows, self.config), columns)
        yield tile_row_sums
        self.column_sums[tile.first_column : tile.first_column + columns].add_(tile_row_sums.sum(0))

    def _times_columns(self, E: Tensor) -> Tensor | None:
        """E G over all blocks, float32, if anything needs it."""
        if not (self.needs.queries or self.needs.scale):
            return None
        product = self.p.queries.new_empty(E.shape[0], self.D, dtype=torch.float32)
        for block in self.blocks:
            multiply(product, E[:, block.columns], block.matrix, add=block.first > 0)
        return product

    def _finish_queries(self, rows: slice, product: Tensor | None, weighted: Tensor | None) -> None:
        query_gradient_epilogue(
            self.p.queries,
            self.p.candidates,
            self.scale,
            product,
            self.cells,
            self.state,
            self.weight_norm,
            self.prob_scale,
            rows.start,
            rows.stop - rows.start,
            query_gradient=self.query_gradient,
            weighted_queries=weighted,
            row_negative_gradient=self.row_negative_gradient,
            scale_gradient=self.scale_gradient,
        )

    def _finish_candidates(self, block: Block, columns: slice, product: Tensor | None) -> None:
        if block.gradient is None or product is None:
            return
        by_column = None
        if block.first == 0:
            starts, targets, target_rows = self._targets_by_column
            by_column = starts[columns.start :], targets, target_rows
        candidate_gradient_epilogue(
            self.p.queries,
            self.scale,
            product,
            self.weight_norm,
            self.prob_scale,
            block.gradient[columns],
            by_column=by_column,
            coefficients=self.cells.coefficients,
        )

    @functools.cached_property
    def _targets_by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each candidate's targets begin, their places in the order of rows, and each place's row."""
        offsets = self.p.targets.offsets
        if offsets is not None:  # place i K + k is in column i + offsets[k]
            K = len(offsets)
            starts = torch.arange(0, self.M * K + 1, K, device=self.cells.columns.device)
            places = [starts[:-1] + (k - K * offset) for k, offset in enumerate(offsets)]
            return starts, torch.stack(places, 1), self.cells.rows
        columns, order = self.cells.columns.sort(stable=True)
        starts = torch.searchsorted(columns, torch.arange(self.M + 1, device=columns.device))
        return starts, order, self.cells.rows


def _numbered(
    query_groups: Tensor | None, candidate_groups: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Groups by numbers that fit 32 bits, equal where the given ones are: a tile holds many at a time."""
    if query_groups is None or candidate_groups is None:
        return None, None
    ordered, order = torch.cat([query_groups, candidate_groups]).sort()
    numbers = torch.zeros_like(order, dtype=torch.int32)
    numbers[order[1:]] = ordered.diff().ne(0).cumsum(0, dtype=torch.int32)
    return numbers[: len(query_groups)], numbers[len(query_groups) :]
