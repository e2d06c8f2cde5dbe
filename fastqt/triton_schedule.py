"""The walk over the score matrix on a GPU, or on the CPU where Triton interprets.

A chunk of whole rows of E = exp(S - r) is kept in the inputs' dtype, and three matrix
products make the gradients: the scores with the exponential in their epilogue, dF = E G and
dG = Eᵀ F. What is particular to a row (its sum, its weight) rides on the rows of F and dF,
so E is written once and never rescaled. The reference r need not be the maximum: float32
and bfloat16 have range to spare, and a row that needed more is found and done again. No
step waits for the device.

memory="low" keeps a narrow chunk of rows for dF, then a narrow one of columns for dG, and
takes the scores once more for the second: 8 N M D instead of 6.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt.kernels import rows as row_kernels
from fastqt.kernels.rows import ExactCells, PrivateNegatives, RowState
from fastqt.kernels.scores import Tile, column_blocks, exp_scores, max_scores
from fastqt.kernels.tuning import score_config
from fastqt.problem import Problem
from fastqt.schedule import Gradients, Needs, Rows

FAST_BYTES = 512 * 2**20  # beside inputs and gradients
LOW_BYTES = 40 * 2**20
SUM_ROWS = 8192  # whose partial sums are kept at a time when nothing else is
SAMPLE = 256  # candidates whose scores help to choose references
ROW_MULTIPLE = 128

# float16 has too little range for exponentials against a rough reference: it takes the
# log-sum-exp first, and keeps 2^15 times the probabilities.
HALF_GAIN = 2.0**15


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    walk = _Walk(p, _uniform(p, 1.0), Needs(False, False, False, False, False))
    for rows in _ranges(walk.N, SUM_ROWS):
        walk.sum_exponentials(rows)
    return walk.rows()


def forward_with_gradients(p: Problem, weight: float, needs: Needs) -> tuple[Rows, Gradients]:
    """The loss of each row, and the gradients of weight * sum_i loss_i."""
    return _gradients(p, _uniform(p, weight), needs)


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i. Sums are cheaper taken again than read."""
    return _gradients(p, row_weights, needs)[1]


def _gradients(p: Problem, weights: Tensor, needs: Needs) -> tuple[Rows, Gradients]:
    walk = _Walk(p, weights, needs)
    if p.memory == "fast":
        walk.whole_rows_once()
    else:
        walk.rows_then_columns()
    return walk.rows(), walk.gradients()


@dataclass
class _Block:
    """Candidates or negatives: columns of E that belong to all rows."""

    matrix: Tensor  # (columns, D)
    first: int  # column of E
    gradient: Tensor | None
    product: Tensor | None = None  # (columns, D) float32

    @property
    def columns(self) -> slice:
        return slice(self.first, self.first + self.matrix.shape[0])


class _Walk:
    def __init__(self, p: Problem, weights: Tensor, needs: Needs) -> None:
        self.p, self.needs = p, needs
        self.N, self.D = p.queries.shape
        self.M = p.candidates.shape[0]
        device, dtype = p.queries.device, p.queries.dtype
        self.scale = _on_device(p.scale, device)
        self.half = dtype is torch.float16
        self.gain = HALF_GAIN if self.half else 1.0
        self.weight_norm = weights.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)

        def gradient_of(x: Tensor | None, wanted: bool) -> Tensor | None:
            return torch.empty(x.shape, dtype=x.dtype, device=device) if wanted and x is not None else None

        self.query_gradient = gradient_of(p.queries, needs.queries)
        self.private_gradient = gradient_of(p.row_negatives, needs.row_negatives)
        self.scale_gradient = p.queries.new_empty(self.N, dtype=torch.float32) if needs.scale else None
        self.blocks = [_Block(p.candidates, 0, gradient_of(p.candidates, needs.candidates))]
        if p.negatives is not None:
            self.blocks.append(_Block(p.negatives, self.M, gradient_of(p.negatives, needs.negatives)))
        self.width = self.blocks[-1].columns.stop
        self.config = score_config(device, dtype, self.N, self.width, self.D)

        self.cells = self._exact_cells()
        self.state = self._row_state(weights)
        self._choose_references()

    def _exact_cells(self) -> ExactCells:
        p = self.p
        starts, columns, weights = p.targets.compressed()
        private = None
        if p.row_negatives is not None:
            found = (p.queries.new_empty(self.N, dtype=torch.float32) for _ in range(3))
            private = PrivateNegatives(p.row_negatives, *found)
        return ExactCells(
            starts,
            torch.where((weights != 0) & (columns >= 0) & (columns < self.M), columns, -1),
            weights,
            *(weights.new_empty(weights.shape, dtype=torch.float32) for _ in range(2)),
            zeroed=self._zeroed(),
            private=private,
        )

    def _zeroed(self) -> Tensor | None:
        """Which rows have a cell of score 0 on the diagonal, (N,) bool."""
        p = self.p
        if p.diagonal != "zero":
            return None
        own = torch.arange(self.N, device=p.queries.device)
        zeroed, own = own < self.M, own.clamp(max=self.M - 1)
        if p.query_groups is not None and p.candidate_groups is not None:
            zeroed &= p.query_groups != p.candidate_groups[own]
        if p.mask is not None:
            zeroed &= ~p.mask[torch.arange(self.N, device=own.device), own]
        return zeroed

    def _row_state(self, weights: Tensor) -> RowState:
        new = self.p.queries.new_empty
        float32 = [new(self.N, dtype=torch.float32) for _ in range(2)]
        float64 = [new(self.N, dtype=torch.float64) for _ in range(4)]
        return RowState(weights, *float32, new(self.N, dtype=torch.int32), *float64)

    def _choose_references(self) -> None:
        sampled = None
        if self.M > 4 * SAMPLE:
            sample = Tile(0, self.N, self.p.candidates[:: self.M // SAMPLE][:SAMPLE])
            maxima = self._partial(sample.candidates.shape[0], self.N)
            max_scores(sample, self.p.queries, self.scale, maxima, self.config)
            sampled = maxima.amax(0)
        row_kernels.references(self.p.queries, self.p.candidates, self.scale, self.cells, self.state, sampled)

    def _partial(self, columns: int, rows: int) -> Tensor:
        return self.p.queries.new_empty(column_blocks(columns, self.config), rows, dtype=torch.float32)

    def tile(self, block: _Block, rows: slice, columns: slice | None = None) -> Tile:
        """Some rows of E against a block, or against some of its columns."""
        p, height = self.p, rows.stop - rows.start
        if block.first:
            return Tile(rows.start, height, block.matrix if columns is None else block.matrix[columns])
        return Tile(
            rows.start,
            height,
            block.matrix if columns is None else block.matrix[columns],
            0 if columns is None else columns.start,
            p.diagonal != "keep",
            self.cells.starts,
            self.cells.columns,
            p.query_groups,
            p.candidate_groups,
            p.mask,
        )

    def sum_exponentials(self, rows: slice, E: Tensor | None = None) -> None:
        """Finds all that is known of some rows, and writes their E where it is given."""
        if E is not None and self.half:
            self.sum_exponentials(rows)
            self._refer_to_logsumexp(rows)
            for block in self.blocks:
                self._exponentiate(self.tile(block, rows), E[:, block.columns])
            return
        p, state, first = self.p, self.state, rows.start
        tiles = [self.tile(block, rows) for block in self.blocks]
        sizes = [column_blocks(block.matrix.shape[0], self.config) for block in self.blocks]
        partial = p.queries.new_empty(sum(sizes), rows.stop - first, dtype=torch.float32)
        parts = partial.split(sizes)

        def add_up(redo: tuple[Tensor, Tensor] | None) -> None:
            for block, tile, part in zip(self.blocks, tiles, parts, strict=True):
                out = None if E is None else E[:, block.columns]
                self._exponentiate(tile, out, part, redo)
            row_kernels.statistics(partial, self.cells, state, first, only_redo=redo is not None)

        add_up(None)
        redo = state.redo, state.redo[rows].amax()
        for tile, part in zip(tiles, parts, strict=True):
            max_scores(tile, p.queries, self.scale, part, self.config, redo=redo)
        row_kernels.raise_references(state, partial, first)
        add_up(redo)

    def _exponentiate(
        self,
        tile: Tile,
        out: Tensor | None,
        partial: Tensor | None = None,
        redo: tuple[Tensor, Tensor] | None = None,
        factors: Tensor | None = None,
    ) -> None:
        exp_scores(
            tile,
            self.p.queries,
            self.scale,
            self.state.references,
            self.config,
            exponentials=out,
            factors=factors,
            partial=partial,
            redo=redo,
        )

    def _refer_to_logsumexp(self, rows: slice) -> None:
        state = self.state
        logsumexp, has_targets = state.logsumexp[rows], state.mass[rows] > 0
        references = (logsumexp - math.log(self.gain)).float()
        state.references[rows] = references.where(has_targets, math.inf)
        state.sums[rows] = (logsumexp - references.double()).exp()

    def whole_rows_once(self) -> None:
        """All gradients from one walk over chunks of whole rows."""
        height = self._fast_rows()
        E = self.p.queries.new_empty(height, _aligned(self.width))
        for block in self.blocks:
            if block.gradient is not None:
                block.product = block.matrix.new_empty(block.matrix.shape, dtype=torch.float32)
        weighted = None
        if any(block.gradient is not None for block in self.blocks):
            weighted = self.p.queries.new_empty(height, self.D)
        for rows in _ranges(self.N, height):
            n = rows.stop - rows.start
            self.sum_exponentials(rows, E[:n])
            self._finish_queries(rows, E[:n], weighted)
            for block in self.blocks:
                if block.product is not None and weighted is not None:
                    _multiply(block.product, E[:n, block.columns].T, weighted[:n], add=rows.start > 0)
        for block in self.blocks:
            self._finish_candidates(block, slice(0, block.matrix.shape[0]), block.product)

    def rows_then_columns(self) -> None:
        """dF from chunks of rows, then dG from chunks of columns: nothing is summed over chunks."""
        p, state, itemsize = self.p, self.state, self.p.queries.element_size()
        height = max(LOW_BYTES // (itemsize * self.width) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        E = p.queries.new_empty(min(height, self.N), _aligned(self.width))
        for rows in _ranges(self.N, height):
            self.sum_exponentials(rows, E[: rows.stop - rows.start])
            self._finish_queries(rows, E[: rows.stop - rows.start], None)
        del E
        share = (state.mass / state.sums).where(state.mass > 0, 0)
        factors = (self.gain * state.weights / self.weight_norm * share).float()
        columns_at_once = max(LOW_BYTES // (itemsize * self.N) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        everything = slice(0, self.N)
        for block in self.blocks:
            if block.gradient is None:
                continue
            E = p.queries.new_empty(self.N, min(columns_at_once, _aligned(block.matrix.shape[0])))
            for columns in _ranges(block.matrix.shape[0], columns_at_once):
                part = E[:, : columns.stop - columns.start]
                self._exponentiate(self.tile(block, everything, columns), part, factors=factors)
                product = p.queries.new_empty(part.shape[1], self.D, dtype=torch.float32)
                _multiply(product, part.T, p.queries, add=False)
                self._finish_candidates(block, columns, product)

    def _finish_queries(self, rows: slice, E: Tensor, weighted: Tensor | None) -> None:
        product = None
        if self.needs.queries or self.needs.scale:
            product = self.p.queries.new_empty(E.shape[0], self.D, dtype=torch.float32)
            for block in self.blocks:
                _multiply(product, E[:, block.columns], block.matrix, add=block.first > 0)
        row_kernels.finish_queries(
            self.p.queries,
            self.p.candidates,
            self.scale,
            product,
            self.cells,
            self.state,
            self.weight_norm,
            self.gain,
            rows.start,
            rows.stop - rows.start,
            query_gradient=self.query_gradient,
            weighted_queries=weighted,
            private_gradient=self.private_gradient,
            scale_gradient=self.scale_gradient,
        )

    def _finish_candidates(self, block: _Block, columns: slice, product: Tensor | None) -> None:
        if block.gradient is None or product is None:
            return
        by_column = None
        if block.first == 0:
            starts, targets, target_rows = self._targets_by_column
            by_column = starts[columns.start :], targets, target_rows
        row_kernels.finish_candidates(
            self.p.queries,
            self.scale,
            product,
            self.weight_norm,
            self.gain,
            block.gradient[columns],
            by_column=by_column,
            coefficients=self.cells.coefficients,
        )

    @functools.cached_property
    def _targets_by_column(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where each candidate's targets begin, their places in the order of rows, and each place's row."""
        columns, order = self.cells.columns.sort(stable=True)
        starts = torch.searchsorted(columns, torch.arange(self.M + 1, device=columns.device))
        rows = torch.arange(self.N, device=columns.device)
        return starts, order, rows.repeat_interleave(self.cells.starts.diff(), output_size=columns.numel())

    def _fast_rows(self) -> int:
        """As many rows as fit beside the sums in float32, a multiple of a tile's."""
        budget = FAST_BYTES
        if self.p.queries.is_cuda and not torch.cuda.is_current_stream_capturing():
            free, _ = torch.cuda.mem_get_info(self.p.queries.device)
            reserved = torch.cuda.memory_reserved(self.p.queries.device)
            reusable = reserved - torch.cuda.memory_allocated(self.p.queries.device)
            budget = min(budget, int(free + reusable) // 2)
        gradients = sum(4 * block.matrix.numel() for block in self.blocks if block.gradient is not None)
        itemsize = self.p.queries.element_size()
        row_bytes = itemsize * _aligned(self.width) + (4 + itemsize) * self.D + 8
        fitting = max((budget - gradients) // row_bytes // ROW_MULTIPLE, 1) * ROW_MULTIPLE
        return min(fitting, self.N)

    def rows(self) -> Rows:
        self._check_targets()
        return Rows(self.state.logsumexp, self.state.mass, self.state.loss)

    def gradients(self) -> Gradients:
        negatives = self.blocks[1].gradient if len(self.blocks) > 1 else None
        by_scale = self.scale_gradient
        return Gradients(
            queries=self.query_gradient,
            candidates=self.blocks[0].gradient,
            negatives=negatives,
            row_negatives=self.private_gradient,
            scale=None if by_scale is None else by_scale.sum(dtype=torch.float64),
        )

    def _check_targets(self) -> None:
        """The reference's checks where they cost no wait; on a GPU an assertion of the device's."""


def _on_device(scale: float | Tensor, device: torch.device) -> Tensor:
    """A scale as kernels read it, without waiting for a device that holds it."""
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.detach().float()
    return torch.full((), float(scale.item() if isinstance(scale, Tensor) else scale), device=device)


def _uniform(p: Problem, weight: float) -> Tensor:
    return p.queries.new_full((p.queries.shape[0],), weight, dtype=torch.float64)


def _multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """out (+)= a b in float32."""
    if a.is_cuda and a.dtype is not torch.float32:
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=int(add), alpha=1, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=int(add))


def _aligned(columns: int) -> int:
    """A row length that starts every row at a multiple of 16 bytes, as matrix products like it."""
    return -(-columns // 64) * 64


def _ranges(n: int, step: int) -> Iterator[slice]:
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
