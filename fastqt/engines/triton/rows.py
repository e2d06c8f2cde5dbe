"""The walk for what the fused product does not serve: scores by a plain one, then whole rows of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastqt.engines.triton.walk import TARGETS_WANTED, Walk, aligned, multiply, ranges
from fastqt.kernels.loss_rows import loss_rows
from fastqt.negatives import mixed_rows
from fastqt.problem import Problem


class RowWalk(Walk):
    """Scores by a plain product in float32, then a kernel that sees whole rows of them."""

    def run(self) -> None:
        p = self.p
        if p.queries.is_cuda:
            torch._assert_async(_sound(p), TARGETS_WANTED)
        if p.partners is not None:  # small problems, or ones whose targets are as large as the scores
            p = self.p = replace(p, row_negatives=mixed_rows(p.candidates, p.mix, p.partners), partners=None)
        row_negatives = p.row_negatives
        queries, itemsize = p.queries, p.queries.element_size()
        width = self.width + (row_negatives is not None)
        cell_bytes = 4 if itemsize == 4 else 4 + itemsize
        height = self.fitting_rows(cell_bytes * aligned(width) + 4 * self.D)
        S = queries.new_empty(height, aligned(width), dtype=torch.float32)
        dS = S if itemsize == 4 else queries.new_empty(S.shape)
        weights = self.prob_scale / self.weight_norm * self.weights
        self.make_products()
        if p.link == "sigmoid":
            self.logsumexp.zero_(), self.mass.zero_()
        if self.bias_gradient is not None:
            self.bias_gradient.zero_()
        for rows in ranges(self.N, height):
            f, scores = queries[rows], S[: rows.stop - rows.start, :width]
            for block in self.blocks:
                multiply(scores[:, block.columns], f, block.matrix.T, add=False)
            if row_negatives is not None:
                scores[:, -1] = (f.float() * row_negatives[rows].float()).sum(1)
            out = dS[: len(scores), :width] if self.differentiates else None
            found = self.logsumexp, self.mass, self.loss
            loss_rows(scores, self.scale, p, rows.start, weights, found, out)
            if out is not None:
                self._multiply_out(rows, f, out)
        factor = self._factor()
        for block in self.blocks:
            if block.gradient is not None and block.product is not None:
                torch.mul(block.product, factor, out=block.gradient)

    def _multiply_out(self, rows: slice, f: Tensor, dS: Tensor) -> None:
        """Adds some rows of dS to the gradients."""
        factor = self._factor()
        for block in self.blocks:
            if block.product is not None:
                multiply(block.product, dS[:, block.columns].T, f, add=rows.start > 0)
        if self.bias_gradient is not None:
            by_column = dS[:, : self.M].sum(0, dtype=torch.float32)
            self.bias_gradient.add_(by_column * (self.weight_norm / self.prob_scale).float())
        row_negatives = self.p.row_negatives
        if self.row_negative_gradient is not None:
            self.row_negative_gradient[rows] = (factor * dS[:, -1:].float() * f.float()).to(f.dtype)
        if self.query_gradient is None and self.scale_gradient is None:
            return
        product = f.new_empty(f.shape, dtype=torch.float32)
        for block in self.blocks:
            multiply(product, dS[:, block.columns], block.matrix, add=block.first > 0)
        if row_negatives is not None:
            product.addcmul_(dS[:, -1:].float(), row_negatives[rows].float())
        if self.scale_gradient is not None:
            by_row = (product * f.float()).sum(1)
            self.scale_gradient[rows] = by_row * (self.weight_norm / self.prob_scale).float()
        if self.query_gradient is not None:
            self.query_gradient[rows] = product.mul_(factor).to(f.dtype)

    def _factor(self) -> Tensor:
        """What a product of dS lacks."""
        return (self.scale * self.weight_norm / self.prob_scale).float()


def _sound(p: Problem) -> Tensor:
    """Whether a loss is defined for the targets, () bool."""
    t, M = p.targets, p.candidates.shape[0]
    if t.dense is not None:
        sound = (t.dense >= 0).all()
        if p.diagonal != "keep":
            sound &= (t.dense.diagonal() == 0).all()
        if p.mask is not None:
            sound &= ~((t.dense != 0) & p.mask).any()
        return sound
    starts, columns, weights = t.compressed()
    row = torch.arange(starts.numel() - 1, device=starts.device)
    row = row.repeat_interleave(starts.diff(), output_size=columns.numel())
    fault = (columns < 0) | (columns >= M)
    if p.diagonal != "keep":
        fault |= row == columns
    if p.mask is not None:
        fault |= p.mask[row, columns.clamp(0, M - 1)]
    return (weights >= 0).all() & ~((weights != 0) & fault).any()
