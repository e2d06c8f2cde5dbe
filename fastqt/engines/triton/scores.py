"""The score matrix as links see it: its tiles, and the exact cells that the tiles leave out."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastqt.engines.triton.operands import TARGETS_WANTED, Block, Operands
from fastqt.kernels.cells import ExactCells, RowNegatives, RowState
from fastqt.kernels.row_shifts import choose_row_shifts
from fastqt.kernels.scores import Tile, column_tiles
from fastqt.kernels.tuning import score_config


class Scores:
    """Tiles of a problem's score matrix, its exact cells, and what becomes known of its rows.

    Args:
        operands: the problem.
        pairs: the exact cells are the diagonal's, so that tiles need no list of targets.
        logsumexp: where each row's goes, (N,) float64; by default the operands' own.
    """

    def __init__(self, operands: Operands, *, pairs: bool = False, logsumexp: Tensor | None = None) -> None:
        self.operands, self.pairs = operands, pairs
        p = operands.p
        shape = operands.N, operands.width, operands.D
        heavy = p.mask is not None or p.link == "sigmoid"
        self.config = score_config(p.queries.device, p.queries.dtype, *shape, heavy, pairs)
        self.groups = _numbered(p.query_groups, p.candidate_groups)
        self.cells = _exact_cells(operands)
        self.state = _row_state(operands, operands.logsumexp if logsumexp is None else logsumexp)

    def choose_shifts(self, sampled: Tensor | None = None) -> None:
        """Finds the exact cells and the rows' shifts; on a GPU, asserts that the targets are sound."""
        choose_row_shifts(self.operands.p, self.operands.scale, self.groups, self.cells, self.state, sampled)
        # Nobody has looked at the targets on a GPU yet; those of pairs are the library's own.
        if self.operands.p.queries.is_cuda and not self.pairs:
            torch._assert_async(self.cells.sound.all(), TARGETS_WANTED)

    def tile(self, block: Block, rows: slice, columns: slice | None = None) -> Tile:
        """Some rows of E against a block, or against some of its columns."""
        p, height = self.operands.p, rows.stop - rows.start
        columns = columns or slice(0, block.matrix.shape[0])
        matrix = block.matrix[columns]
        if self.pairs:
            return Tile(rows.start, height, matrix, columns.start, exclude_diagonal=True)
        if block.first:
            return Tile(rows.start, height, matrix)
        return Tile(
            *(rows.start, height, matrix, columns.start, p.diagonal != "keep"),
            *(self.cells.starts, self.cells.columns, self.cells.lowest, self.cells.highest),
            *self.groups,
            p.mask,
            None if p.bias is None else p.bias[columns],
        )

    def tile_row_sums(self, rows: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Room for the sums of some rows by tiles of columns, and each block's part of it."""
        sizes = [column_tiles(block.matrix.shape[0], self.config) for block in self.operands.blocks]
        height = rows.stop - rows.start
        sums = self.operands.p.queries.new_empty(sum(sizes), height, dtype=torch.float32)
        return sums, sums.split(sizes)

    @functools.cached_property
    def targets_by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each candidate's targets begin, their places in the order of rows, and each place's row."""
        cells, M = self.cells, self.operands.M
        if self.pairs:  # Each column's only target is in its own row.
            return cells.starts, cells.columns, cells.columns
        offsets = self.operands.p.targets.offsets
        if offsets is not None:  # Place i K + k is in column i + offsets[k].
            K = len(offsets)
            starts = torch.arange(0, M * K + 1, K, device=cells.columns.device)
            places = [starts[:-1] + (k - K * offset) for k, offset in enumerate(offsets)]
            return starts, torch.stack(places, 1), cells.rows
        columns, order = cells.columns.sort(stable=True)
        starts = torch.searchsorted(columns, torch.arange(M + 1, device=columns.device))
        return starts, order, cells.rows


def _exact_cells(operands: Operands) -> ExactCells:
    p, N, new = operands.p, operands.N, operands.p.queries.new_empty
    starts, columns, weights = p.targets.compressed()
    row_negatives = None
    if p.row_negatives is not None or p.partners is not None:
        matrix = p.candidates if p.row_negatives is None else p.row_negatives
        found = (new(N, dtype=torch.float32) for _ in range(3))
        row_negatives = RowNegatives(matrix, *found, p.partners, p.mix)
    return ExactCells(
        starts,
        weights,
        *(torch.empty_like(columns) for _ in range(2)),
        *(new(columns.shape, dtype=torch.float32) for _ in range(2)),
        *(new(N, dtype=torch.int32) for _ in range(2)),
        sound=new(N, dtype=torch.bool),
        zeroed=new(N, dtype=torch.bool) if p.diagonal == "zero" else None,
        row_negatives=row_negatives,
    )


def _row_state(operands: Operands, logsumexp: Tensor) -> RowState:
    new, N = operands.p.queries.new_empty, operands.N
    return RowState(
        weights=operands.weights,
        exact_max_log2=new(N, dtype=torch.float32),
        row_shift_log2=new(N, dtype=torch.float32),
        shift_overflowed=new(N, dtype=torch.int32),
        repairs_done=new(N, dtype=torch.int32),
        factors=new(N, dtype=torch.float64),
        logsumexp=logsumexp,
        mass=operands.mass,
        loss=operands.loss,
        of_log_sum_exp=operands.p.link == "log_sum_exp",
    )


def _numbered(
    query_groups: Tensor | None, candidate_groups: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Groups by numbers of 32 bits, equal where the given ones are: a tile holds many at a time."""
    if query_groups is None or candidate_groups is None:
        return None, None
    ordered, order = torch.cat([query_groups, candidate_groups]).sort()
    numbers = torch.zeros_like(order, dtype=torch.int32)
    numbers[order[1:]] = ordered.diff().ne(0).cumsum(0, dtype=torch.int32)
    return numbers[: len(query_groups)], numbers[len(query_groups) :]
