"""MixCSE's three blocks of scores on a GPU, or where Triton interprets.

The vendor's product gives the cosines of a chunk of rows in float32. One kernel finds the rows' losses from
them, another each cosine's gradient, and two products end it. No step waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines.products import multiply
from fastqt.engines.triton.copies import Copies
from fastqt.engines.triton.free_memory import asked_again_if_none_is_left
from fastqt.engines.triton.heights import rows_that_fit
from fastqt.engines.triton.operands import (
    Operands,
    aligned,
    ranges,
    room_for,
    weighted_sum,
)
from fastqt.kernels.three_block import Lines, Mixtures, RowSums, three_block_rows
from fastqt.kernels.three_block_gradients import three_block_gradients
from fastqt.problem import (
    Needs,
    Problem,
    Rows,
    ThreeBlockGradients,
    ThreeBlockInputs,
    ThreeBlockNeeds,
    ThreeBlockProblem,
)
from fastqt.targets import Diagonal


def gradients_in_forward(p: ThreeBlockProblem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


@asked_again_if_none_is_left
def forward(p: ThreeBlockProblem) -> Rows:
    """The loss of each row."""
    walk = _Walk(p, 1.0, ThreeBlockNeeds())
    walk.run()
    return Rows(walk.operands.loss, ())


@asked_again_if_none_is_left
def forward_with_gradients(
    p: ThreeBlockProblem, row_weight: float, needs: ThreeBlockNeeds
) -> tuple[Tensor, ThreeBlockGradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    walk = _Walk(p, row_weight, needs)
    walk.run()
    return weighted_sum(walk.operands.loss, row_weight), walk.gradients()


@asked_again_if_none_is_left
def backward(
    p: ThreeBlockProblem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: ThreeBlockNeeds
) -> ThreeBlockGradients:
    """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
    walk = _Walk(p, row_weights, needs)
    walk.run()
    return walk.gradients()


class _Walk:
    """One pass over chunks of rows, which finds the losses and adds up the gradients that are needed."""

    def __init__(self, p: ThreeBlockProblem, weights: float | Tensor, needs: ThreeBlockNeeds) -> None:
        u, v = p.queries.contiguous(), p.candidates.contiguous()
        targets = Diagonal().rows(len(u), len(u), u.device)
        rows = Problem(u, v, None, None, p.scale, targets, "keep", None, None, None, p.memory)
        wanted = Needs(queries=needs.queries, candidates=needs.candidates, scale=needs.scale)
        self.p, self.needs = p, needs

        copies = Copies.of(rows, room_for(rows), rounds=False)
        o = self.operands = Operands(rows, weights, wanted, copies)
        inputs = p.own_columns, p.next_columns, p.own_rows, p.next_rows
        shares = [x.detach().float().contiguous() for x in inputs]
        self.mixtures = Mixtures(*shares, o.scale, p.own_mixture_weight, p.third_block, p.masks_excluded)

        # Without a stop gradient both sides are parts of all scores, and have the same dL/dC.
        self.joined = not p.stop_gradient

        weight_norm = o.weight_norm
        if o.prob_scale != 1:
            # A cell has parts of its own row and of the row above, each at most the largest share times the
            # weight; and shares are large where the parts of a mixture all but cancel.
            largest = torch.stack(shares).abs().nan_to_num_(1.0).amax().clamp(min=1)
            weight_norm = weight_norm * (2 * largest)

        # Sums of dL/dS are to be multiplied by `unit`, and those of dL/dC by `factor`.
        self.unit = (weight_norm / o.prob_scale).float()
        self.factor = o.scale * self.unit

        self.by_column, self.by_row = (
            u.new_zeros(2, o.N, dtype=torch.float32) if share or next_share else None
            for share, next_share in (
                (needs.own_columns, needs.next_columns),
                (needs.own_rows, needs.next_rows),
            )
        )

        self.sums = self.weights = None
        if any(needs):
            self.weights = o.prob_scale / weight_norm * o.weights
            self.sums = RowSums(*(u.new_empty(o.N, dtype=torch.float32) for _ in range(3)))

    def run(self) -> None:
        o = self.operands
        v, N, width = o.copies.candidates, o.N, aligned(o.N)

        queries, candidates = bool(self.needs.queries), bool(self.needs.candidates)
        folded = (queries or candidates, False) if self.joined else (queries, candidates)
        cell_bytes = 4 + sum(folded) * v.element_size()

        fitting = o.room_beside_products // (cell_bytes * width + (4 + v.element_size()) * o.copies.width)
        # A chunk needs the lines above and below it, which are its own where it has all rows.
        step = rows_that_fit(o, fitting if fitting >= N else fitting - 2)

        cosines = v.new_empty(N if step == N else step + 2, width, dtype=torch.float32)
        matrices = [v.new_empty(step, width) if x else None for x in folded]

        o.make_products()
        for rows in ranges(N, step):
            first, around = self._around(rows)
            lines = Lines(cosines[: len(around), :N], first)

            multiply(lines.cosines, around, v.T, add=False)
            three_block_rows(lines, self.mixtures, self.weights, o.loss, self.sums)

            if self.sums is not None:
                dS = [x if x is None else x[: rows.stop - rows.start, :N] for x in matrices]
                self._differentiate(lines, self.sums, rows, *dS)

        for block in o.blocks:
            if block.gradient is not None and block.product is not None:
                torch.mul(block.product[:, : o.D], self.factor, out=block.gradient)

    def _around(self, rows: slice) -> tuple[int, Tensor]:
        """Those of the queries with the ones above and below them, and the first one's number."""
        u, start, stop = self.operands.copies.queries, rows.start - 1, rows.stop + 1
        if rows.stop - rows.start == len(u):
            return 0, u
        if start >= 0 and stop <= len(u):
            return start, u[start:stop]
        return start % len(u), torch.cat([u[start:], u[: stop % len(u)]])

    def _differentiate(
        self,
        lines: Lines,
        sums: RowSums,
        rows: slice,
        to_queries: Tensor | None,
        to_candidates: Tensor | None,
    ) -> None:
        """Adds what some rows give to the gradients."""
        o, needs = self.operands, self.needs
        by_scale, by_row, by_column = three_block_gradients(
            lines,
            self.mixtures,
            sums,
            rows,
            to_queries,
            to_candidates,
            joined=self.joined,
            scale=o.scale_gradient is not None,
            shares=any((needs.own_columns, needs.next_columns, needs.own_rows, needs.next_rows)),
        )

        if o.scale_gradient is not None and by_scale is not None:
            o.scale_gradient[rows] = by_scale * self.unit
        if self.by_row is not None and by_row is not None:
            self.by_row[:, rows] = by_row
        if self.by_column is not None and by_column is not None:
            self.by_column += by_column

        if o.query_gradient is not None and to_queries is not None:
            product = to_queries.new_empty(len(to_queries), o.copies.width, dtype=torch.float32)
            multiply(product, to_queries, o.copies.candidates, add=False)
            torch.mul(product[:, : o.D], self.factor, out=o.query_gradient[rows])

        matrix, total = to_queries if self.joined else to_candidates, o.blocks[0].product
        if matrix is not None and total is not None:
            multiply(total, matrix.T, o.copies.queries[rows], add=rows.start > 0)

    def gradients(self) -> ThreeBlockGradients:
        """Those that are needed."""
        gradients = self.operands.gradients()
        own_columns, next_columns = self._shares(self.by_column)
        own_rows, next_rows = self._shares(self.by_row)
        return ThreeBlockInputs(
            queries=gradients.queries,
            candidates=gradients.candidates,
            own_columns=own_columns if self.needs.own_columns else None,
            next_columns=next_columns if self.needs.next_columns else None,
            own_rows=own_rows if self.needs.own_rows else None,
            next_rows=next_rows if self.needs.next_rows else None,
            scale=gradients.scale,
        )

    def _shares(self, sums: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """Both gradients of a side's shares."""
        if sums is None:
            return None, None
        share, next_share = sums * self.factor
        return share, next_share
