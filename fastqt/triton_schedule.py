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
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastqt.kernels import rows as row_kernels
from fastqt.kernels.rows import ExactCells, PrivateNegatives, RowState
from fastqt.kernels.scores import Tile, column_blocks, exp_scores, max_scores
from fastqt.kernels.softmax_rows import softmax_rows
from fastqt.kernels.tuning import score_config
from fastqt.negatives import mixed_rows
from fastqt.problem import Problem
from fastqt.reference import check_targets
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
    return _walk(p, 1.0, Needs(False, False, False, False, False))[0]


def forward_with_gradients(p: Problem, weight: float, needs: Needs) -> tuple[Rows, Gradients]:
    """The loss of each row, and the gradients of weight * sum_i loss_i."""
    return _walk(p, weight, needs)


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i. Sums are cheaper taken again than read."""
    return _walk(p, row_weights, needs)[1]


def _walk(p: Problem, weights: float | Tensor, needs: Needs) -> tuple[Rows, Gradients]:
    _check_targets(p)
    kind = _RowWalk if needs_whole_rows(p) else _FusedWalk
    walk = kind(p, weights, needs)
    walk.run()
    return Rows(walk.logsumexp, walk.mass, walk.loss), walk.gradients()


def needs_whole_rows(p: Problem) -> bool:
    """Whether every cell of a row may be a target, which the fused product does not serve."""
    return p.targets.dense is not None or p.targets.background is not None


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
    """One walk over the score matrix, and what comes of it."""

    def __init__(self, p: Problem, weights: float | Tensor, needs: Needs) -> None:
        self.p, self.needs = p, needs
        self.N, self.D = p.queries.shape
        self.M = p.candidates.shape[0]
        new, dtype = p.queries.new_empty, p.queries.dtype
        self.scale = _on_device(p.scale, p.queries.device)
        if not isinstance(weights, Tensor):
            weights = p.queries.new_full((self.N,), weights, dtype=torch.float64)
        self.weights = weights
        # Rows take their weight relative to the largest, so that no dtype's range is left.
        self.weight_norm = weights.abs().amax().clamp(min=torch.finfo(torch.float64).tiny)
        self.gain = 1.0
        if dtype is torch.float16:
            self.gain = HALF_GAIN
            self.weight_norm *= _largest_mass(p).clamp(min=1)

        def gradient_of(x: Tensor | None, wanted: bool) -> Tensor | None:
            return new(x.shape) if wanted and x is not None else None

        self.query_gradient = gradient_of(p.queries, needs.queries)
        self.private_gradient = gradient_of(p.row_negatives, needs.row_negatives)
        self.scale_gradient = new(self.N, dtype=torch.float32) if needs.scale else None
        self.blocks = [_Block(p.candidates, 0, gradient_of(p.candidates, needs.candidates))]
        if p.negatives is not None:
            self.blocks.append(_Block(p.negatives, self.M, gradient_of(p.negatives, needs.negatives)))
        self.width = self.blocks[-1].columns.stop
        self.logsumexp, self.mass, self.loss = (new(self.N, dtype=torch.float64) for _ in range(3))

    @property
    def differentiates(self) -> bool:
        needs = self.needs
        return any((needs.queries, needs.candidates, needs.negatives, needs.row_negatives, needs.scale))

    def run(self) -> None:
        raise NotImplementedError

    def make_products(self) -> None:
        """Room for the sums over chunks of rows, in float32."""
        for block in self.blocks:
            if block.gradient is not None:
                block.product = block.matrix.new_empty(block.matrix.shape, dtype=torch.float32)

    def fitting_rows(self, most: int, row_bytes: int) -> int:
        """As many rows as fit beside those sums, or in half of it all, a multiple of a tile's, at most N."""
        device = self.p.queries.device
        if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
            free, _ = torch.cuda.mem_get_info(device)
            reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            most = min(most, int(free + reusable) // 2)
        sums = sum(4 * block.matrix.numel() for block in self.blocks if block.gradient is not None)
        rows = max(most - sums, most // 2) // row_bytes
        return min(max(rows // ROW_MULTIPLE, 1) * ROW_MULTIPLE, self.N)

    def gradients(self) -> Gradients:
        by_scale = self.scale_gradient
        return Gradients(
            queries=self.query_gradient,
            candidates=self.blocks[0].gradient,
            negatives=self.blocks[1].gradient if len(self.blocks) > 1 else None,
            row_negatives=self.private_gradient,
            scale=None if by_scale is None else by_scale.sum(dtype=torch.float64),
        )


class _FusedWalk(_Walk):
    """Scores with the exponential in their product's epilogue; targets one by one."""

    def __init__(self, p: Problem, weights: float | Tensor, needs: Needs) -> None:
        super().__init__(p, weights, needs)
        self.config = score_config(p.queries.device, p.queries.dtype, self.N, self.width, self.D)
        self.cells = self._exact_cells()
        self.state = self._row_state()
        self._choose_references()

    def run(self) -> None:
        if not self.differentiates:
            for rows in _ranges(self.N, SUM_ROWS):
                self.sum_exponentials(rows)
        elif self.p.memory == "fast":
            self.whole_rows_once()
        else:
            self.rows_then_columns()

    def _exact_cells(self) -> ExactCells:
        p = self.p
        starts, columns, weights = p.targets.compressed()
        private = None
        if p.row_negatives is not None or p.partners is not None:
            matrix = p.candidates if p.row_negatives is None else p.row_negatives
            found = (p.queries.new_empty(self.N, dtype=torch.float32) for _ in range(3))
            private = PrivateNegatives(matrix, *found, p.partners, p.mix)
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

    def _row_state(self) -> RowState:
        new, N = self.p.queries.new_empty, self.N
        return RowState(
            weights=self.weights,
            bases=new(N, dtype=torch.float32),
            references=new(N, dtype=torch.float32),
            redo=new(N, dtype=torch.int32),
            sums=new(N, dtype=torch.float64),
            logsumexp=self.logsumexp,
            mass=self.mass,
            loss=self.loss,
        )

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
        if E is not None and self.gain != 1:
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
        itemsize = self.p.queries.element_size()
        row_bytes = itemsize * _aligned(self.width) + (4 + itemsize) * self.D
        height = self.fitting_rows(FAST_BYTES, row_bytes)
        E = self.p.queries.new_empty(height, _aligned(self.width))
        self.make_products()
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


class _RowWalk(_Walk):
    """Scores by a plain product in float32, then a kernel that sees whole rows of them."""

    def run(self) -> None:
        p = self.p
        if p.partners is not None:  # small problems, or ones whose targets are as large as the scores
            p = self.p = replace(p, row_negatives=mixed_rows(p.candidates, p.mix, p.partners), partners=None)
        private = p.row_negatives
        queries, itemsize = p.queries, p.queries.element_size()
        width = self.width + (private is not None)
        cell_bytes = 4 if itemsize == 4 else 4 + itemsize
        most = FAST_BYTES if p.memory == "fast" else LOW_BYTES
        height = self.fitting_rows(most, cell_bytes * _aligned(width) + 4 * self.D)
        S = queries.new_empty(height, _aligned(width), dtype=torch.float32)
        dS = S if itemsize == 4 else queries.new_empty(S.shape)
        weights = self.gain / self.weight_norm * self.weights
        self.make_products()
        for rows in _ranges(self.N, height):
            f, scores = queries[rows], S[: rows.stop - rows.start, :width]
            for block in self.blocks:
                _multiply(scores[:, block.columns], f, block.matrix.T, add=False)
            if private is not None:
                scores[:, -1] = (f.float() * private[rows].float()).sum(1)
            out = dS[: len(scores), :width] if self.differentiates else None
            found = self.logsumexp, self.mass, self.loss
            softmax_rows(scores, self.scale, p, rows.start, weights, found, out)
            if out is not None:
                self._multiply_out(rows, f, out)
        factor = self._factor()
        for block in self.blocks:
            if block.gradient is not None and block.product is not None:
                torch.mul(block.product, factor, out=block.product)
                block.gradient.copy_(block.product)

    def _multiply_out(self, rows: slice, f: Tensor, dS: Tensor) -> None:
        """Adds some rows of dS to the gradients."""
        factor = self._factor()
        for block in self.blocks:
            if block.product is not None:
                _multiply(block.product, dS[:, block.columns].T, f, add=rows.start > 0)
        private = self.p.row_negatives
        if self.private_gradient is not None:
            self.private_gradient[rows] = (factor * dS[:, -1:].float() * f.float()).to(f.dtype)
        if self.query_gradient is None and self.scale_gradient is None:
            return
        product = f.new_empty(f.shape, dtype=torch.float32)
        for block in self.blocks:
            _multiply(product, dS[:, block.columns], block.matrix, add=block.first > 0)
        if private is not None:
            product.addcmul_(dS[:, -1:].float(), private[rows].float())
        if self.scale_gradient is not None:
            by_row = (product * f.float()).sum(1)
            self.scale_gradient[rows] = by_row * (self.weight_norm / self.gain).float()
        if self.query_gradient is not None:
            self.query_gradient[rows] = product.mul_(factor).to(f.dtype)

    def _factor(self) -> Tensor:
        """What a product of dS lacks."""
        return (self.scale * self.weight_norm / self.gain).float()


def _largest_mass(p: Problem) -> Tensor:
    """The largest sum of a row of T, () float64."""
    t = p.targets
    if t.dense is not None:
        mass = t.dense.sum(1, dtype=torch.float64)
    else:
        starts, _, weights = t.compressed()
        mass = torch.cat([weights.new_zeros(1), weights.cumsum(0)])[starts].diff()
    if t.background is not None:
        mass = mass + p.candidates.shape[0] * t.background
    return mass.amax()


def _check_targets(p: Problem) -> None:
    """Refuses what no loss is defined for: in words on a CPU, on a GPU by an assertion on the device."""
    if not p.queries.is_cuda:
        check_targets(p)
        return
    t, M = p.targets, p.candidates.shape[0]
    if t.dense is not None:
        sound = (t.dense >= 0).all()
        if p.diagonal != "keep":
            sound &= (t.dense.diagonal() == 0).all()
        if p.mask is not None:
            sound &= ~((t.dense != 0) & p.mask).any()
    else:
        starts, columns, weights = t.compressed()
        row = torch.arange(starts.numel() - 1, device=starts.device)
        row = row.repeat_interleave(starts.diff(), output_size=columns.numel())
        given = weights != 0
        fault = (columns < 0) | (columns >= M)
        if p.diagonal != "keep":
            fault |= row == columns
        if p.mask is not None:
            fault |= p.mask[row, columns.clamp(0, M - 1)]
        sound = (weights >= 0).all() & ~(given & fault).any()
    torch._assert_async(
        sound, "targets: want weights >= 0 at candidates that are neither masked nor on a replaced diagonal"
    )


def _on_device(scale: float | Tensor, device: torch.device) -> Tensor:
    """A scale as kernels read it, without waiting for a device that holds it."""
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.detach().float()
    return torch.full((), float(scale.item() if isinstance(scale, Tensor) else scale), device=device)


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
