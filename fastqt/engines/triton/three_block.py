"""The walk over MixCSE's 3 N columns on a GPU, or where Triton interprets.

The cosines of a chunk of rows come from the vendor's product in float32. One kernel finds the rows' losses
from them, another each cosine's gradient, and two products end it. No step waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastqt.engines.triton.walk import Walk, aligned, even, multiply, ranges
from fastqt.kernels.three_block import Lines, Mixtures, RowSums, three_block_rows
from fastqt.kernels.three_block_gradients import three_block_gradients
from fastqt.problem import Needs, Problem
from fastqt.targets import Diagonal

if TYPE_CHECKING:
    from fastqt.losses.three_block import Gradients, Options


def walk(
    inputs: tuple[Tensor, ...], options: Options, weights: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """Each row's loss, and with weights w the gradients of sum_i w_i loss_i that are needed."""
    made = _Walk(inputs, options, weights, needs)
    made.run()
    return made.loss, made.in_order()


class _Walk(Walk):
    def __init__(
        self, inputs: tuple[Tensor, ...], options: Options, weights: Tensor | None, needs: tuple[bool, ...]
    ) -> None:
        u, v, *shares, scale = inputs
        targets = Diagonal().rows(len(u), len(u), u.device)
        p = Problem(
            *(u.contiguous(), v.contiguous(), None, None, scale, targets, "keep", None, None, None),
            memory=options.memory,
        )
        self.wanted = needs if weights is not None else (False,) * len(needs)
        chosen = Needs(queries=self.wanted[0], candidates=self.wanted[1], scale=self.wanted[6])
        super().__init__(p, 1.0 if weights is None else weights, chosen)
        shares = [x.detach().float().contiguous() for x in shares]
        self.mixtures = Mixtures(*shares, self.scale, options.weight, options.both, options.excluded)
        # Without a stop gradient both sides are parts of all scores, and have the same dL/dC.
        self.joined = not options.stop_gradient
        if self.prob_scale != 1:
            # A cell has parts of its own row and of the row above, each at most the largest share times the
            # weight; and shares are large where the parts of a mixture all but cancel.
            largest = torch.stack(shares).abs().nan_to_num_(1.0).amax().clamp(min=1)
            self.weight_norm = self.weight_norm * (2 * largest)
        # What sums of dL/dS lack, and what those of dL/dC do.
        self.unit = (self.weight_norm / self.prob_scale).float()
        self.factor = self.scale * self.unit
        self.by_column, self.by_row = (
            u.new_zeros(2, self.N, dtype=torch.float32) if any(self.wanted[k : k + 2]) else None
            for k in (2, 4)
        )
        self.sums = None
        if any(self.wanted):
            self.sums = RowSums(*(u.new_empty(self.N, dtype=torch.float32) for _ in range(3)))

    def run(self) -> None:
        v, N, width = self.p.candidates, self.N, aligned(self.N)
        queries, candidates = self.wanted[:2]
        folded = (queries or candidates, False) if self.joined else (queries, candidates)
        cell_bytes = 4 + sum(folded) * v.element_size()
        height = self.fitting_rows(cell_bytes * width + (4 + v.element_size()) * self.D)
        # A chunk needs the lines above and below it, which are its own where it has all rows.
        step = N if height == N else even(N, height - 2, 1)
        cosines = v.new_empty(N if step == N else step + 2, width, dtype=torch.float32)
        matrices = [v.new_empty(step, width) if x else None for x in folded]
        weights = None if self.sums is None else self.prob_scale / self.weight_norm * self.weights
        self.make_products()
        for rows in ranges(N, step):
            first, around = self._around(rows)
            lines = Lines(cosines[: len(around), :N], first)
            multiply(lines.cosines, around, v.T, add=False)
            three_block_rows(lines, self.mixtures, weights, self.loss, self.sums)
            if self.sums is not None:
                dS = [x if x is None else x[: rows.stop - rows.start, :N] for x in matrices]
                self._differentiate(lines, self.sums, rows, *dS)
        for block in self.blocks:
            if block.gradient is not None and block.product is not None:
                torch.mul(block.product, self.factor, out=block.gradient)

    def _around(self, rows: slice) -> tuple[int, Tensor]:
        """Those of the queries, with the ones above and below them, and the first one's number."""
        u, start, stop = self.p.queries, rows.start - 1, rows.stop + 1
        if rows.stop - rows.start == self.N:
            return 0, u
        if start >= 0 and stop <= self.N:
            return start, u[start:stop]
        return start % self.N, torch.cat([u[start:], u[: stop % self.N]])

    def _differentiate(
        self,
        lines: Lines,
        sums: RowSums,
        rows: slice,
        to_queries: Tensor | None,
        to_candidates: Tensor | None,
    ) -> None:
        """Adds what some rows give to the gradients."""
        by_scale, by_row, by_column = three_block_gradients(
            *(lines, self.mixtures, sums, rows, to_queries, to_candidates),
            joined=self.joined,
            scale=self.scale_gradient is not None,
            shares=any(self.wanted[2:6]),
        )
        if self.scale_gradient is not None and by_scale is not None:
            self.scale_gradient[rows] = by_scale * self.unit
        if self.by_row is not None and by_row is not None:
            self.by_row[:, rows] = by_row
        if self.by_column is not None and by_column is not None:
            self.by_column += by_column
        if self.query_gradient is not None and to_queries is not None:
            product = to_queries.new_empty(len(to_queries), self.D, dtype=torch.float32)
            multiply(product, to_queries, self.p.candidates, add=False)
            torch.mul(product, self.factor, out=self.query_gradient[rows])
        matrix, total = to_queries if self.joined else to_candidates, self.blocks[0].product
        if matrix is not None and total is not None:
            multiply(total, matrix.T, self.p.queries[rows], add=rows.start > 0)

    def in_order(self) -> Gradients:
        """The gradients that are wanted, in the order of the inputs."""
        made = self.gradients()
        shares = [None if x is None else x * self.factor for x in (self.by_column, self.by_row)]
        own_and_next = [x for pair in shares for x in ((None, None) if pair is None else pair)]
        scale = made.scale
        if scale is not None and isinstance(self.p.scale, Tensor):
            scale = scale.to(self.p.scale)
        found = made.queries, made.candidates, *own_and_next, scale
        return tuple(x if wanted else None for x, wanted in zip(found, self.wanted, strict=True))
