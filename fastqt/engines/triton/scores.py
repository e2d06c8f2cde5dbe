"""The score matrix as links see it: its tiles, and the exact cells that the tiles leave out."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastqt.engines.reference.contrastive import TARGETS_WANTED
from fastqt.engines.triton.operands import Block, Operands
from fastqt.kernels.cells import ByColumn, ExactCells, RowNegatives, RowState
from fastqt.kernels.norms import inverse_norms
from fastqt.kernels.row_shifts import choose_row_shifts
from fastqt.kernels.scores import Tile, column_tiles
from fastqt.kernels.tuning import score_config
from fastqt.problem import Problem


class Norms(NamedTuple):
    """The inverse norms of rows, (rows,) float32; None where scores are no cosines, or rows are absent."""

    queries: Tensor | None = None
    candidates: Tensor | None = None
    negatives: Tensor | None = None
    row_negatives: Tensor | None = None

    @classmethod
    def of(cls, p: Problem) -> Norms:
        if not p.normalize:
            return cls()
        matrices = p.queries, p.candidates, p.negatives, p.row_negatives
        return cls(*(None if x is None else inverse_norms(x) for x in matrices))

    def of_pair(
        self, block: Block, columns: slice | None = None
    ) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """Those of the queries, and of a block or some of its columns."""
        of_block = self.negatives if block.first else self.candidates
        if self.queries is None or of_block is None:
            return None, None
        return self.queries, of_block if columns is None else of_block[columns]


class Scores:
    """Tiles of a problem's score matrix, its exact cells, and what becomes known of its rows."""

    def __init__(
        self,
        operands: Operands,
        *,
        # Whether the exact cells are the diagonal's, or there are none: tiles need no list of targets then.
        # None: exact cells are listed.
        pairs: bool | None = None,
        logsumexp: Tensor | None = None,  # (N,) float64, where each row's goes; by default the operands' own
        norms: Norms | None = None,  # those of the problem, if they are known
        both_ways: bool = False,  # whether E is stored of a softmax of rows and of one of columns
    ) -> None:
        self.operands, self.pairs = operands, pairs
        p = operands.p
        self.norms = norms or Norms.of(p)

        shape = operands.N, operands.width, operands.copies.width
        wide = p.normalize and (p.mask is not None or both_ways)
        crowded = p.normalize and p.bias is not None and p.thresholds is not None
        heavy = p.mask is not None or p.link == "sigmoid" or wide or crowded
        few_columns = pairs is not None or p.normalize
        of_columns = p.bias is not None or p.query_groups is not None
        self.config = score_config(
            p.queries.device, p.queries.dtype, *shape, heavy, few_columns, wide, of_columns
        )

        self.groups = _numbered(p.query_groups, p.candidate_groups)
        self.cells = _exact_cells(operands, self.norms)
        self.state = _row_state(operands, operands.logsumexp if logsumexp is None else logsumexp)

    def choose_shifts(self, sampled: Tensor | None = None) -> None:
        """Finds the exact cells and the rows' shifts; on a GPU, asserts that the targets are sound."""
        choose_row_shifts(
            self.operands.p,
            self.operands.scale,
            self.groups,
            self.cells,
            self.state,
            sampled,
            self.norms.of_pair(self.operands.blocks[0]),
        )

        # Nobody has looked at the targets on a GPU yet. Those of a band are the library's own.
        p = self.operands.p
        if p.queries.is_cuda and (p.targets.offsets is None or p.mask is not None):
            torch._assert_async(self.cells.sound.all(), TARGETS_WANTED)

    def set_factors(self, factor: Tensor) -> None:
        """Sets the factors of rows of which E holds all weights, their inverse norms among them."""
        self.state.factors.copy_(factor)
        if self.norms.queries is not None:
            self.state.factors.div_(self.norms.queries)

    def tile(self, block: Block, rows: slice, columns: slice | None = None) -> Tile:
        """Some rows of E against a block, or against some of its columns."""
        p, height = self.operands.p, rows.stop - rows.start
        columns = columns or slice(0, block.operand.shape[0])
        matrix = block.operand[columns]

        of_queries, of_columns = self.norms.of_pair(block, columns)
        of_operands: dict[str, Any] = {
            "query_inverse_norms": of_queries,
            "candidate_inverse_norms": of_columns,
            "thresholds": p.thresholds,
            "rounded": self.operands.copies.rounded,
        }

        if self.pairs is not None:
            pairs: dict[str, Any] = {"exclude_diagonal": self.pairs, "mask": p.mask}
            return Tile(rows.start, height, matrix, columns.start, **pairs, **of_operands)
        if block.first:
            return Tile(rows.start, height, matrix, **of_operands)
        return Tile(
            rows.start,
            height,
            matrix,
            columns.start,
            p.diagonal != "keep",
            self.cells.starts,
            self.cells.columns,
            self.cells.lowest,
            self.cells.highest,
            *self.groups,
            p.mask,
            None if p.bias is None else p.bias[columns],
            **of_operands,
        )

    def tile_row_sums(self, rows: slice) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Room for the sums of some rows by tiles of columns, and each block's part of it."""
        sizes = [column_tiles(block.matrix.shape[0], self.config) for block in self.operands.blocks]
        height = rows.stop - rows.start
        sums = self.operands.p.queries.new_empty(sum(sizes), height, dtype=torch.float32)
        return sums, sums.split(sizes)

    @functools.cached_property
    def targets_by_column(self) -> ByColumn:
        """Where the kernels find each candidate's targets: a band's by its offsets, others in lists."""
        cells, M = self.cells, self.operands.M
        if self.operands.p.targets.offsets is not None:
            return ByColumn(offsets=self.operands.p.targets.offsets)
        columns, order = cells.columns.sort(stable=True)
        starts = torch.searchsorted(columns, torch.arange(M + 1, device=columns.device))
        return ByColumn(starts, order, cells.rows)


def _exact_cells(operands: Operands, norms: Norms) -> ExactCells:
    p, N, new = operands.p, operands.N, operands.p.queries.new_empty
    starts, columns, weights = p.targets.compressed()

    row_negatives = operands.scored_row_negatives
    if p.row_negatives is not None or p.partners is not None:
        matrix = p.candidates if p.row_negatives is None else p.row_negatives
        scores, lengths, coefficients = (new(N, dtype=torch.float32) for _ in range(3))
        if norms.row_negatives is not None:
            torch.reciprocal(norms.row_negatives, out=lengths)
        row_negatives = RowNegatives(matrix, scores, lengths, coefficients, p.partners, p.mix)

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
        of_cosines=operands.p.normalize,
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
