"""Whole rows of scores, for problems in which any cell may be a target: target matrices and smoothed targets.

A plain product writes the scores of a chunk of rows in float32, and one kernel turns them into dL/dS.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fastqt.engines.products import multiply
from fastqt.engines.reference.contrastive import TARGETS_WANTED
from fastqt.engines.soundness import sound
from fastqt.engines.triton.heights import chunk_rows
from fastqt.engines.triton.operands import Operands, aligned, ranges
from fastqt.kernels.loss_rows import loss_rows
from fastqt.negatives import mixed_rows


def run(o: Operands) -> None:
    """Finds the losses and gradients of the operands."""
    p = o.p
    if p.queries.is_cuda:
        torch._assert_async(sound(p), TARGETS_WANTED)
    if p.partners is not None:  # The mixed rows are small beside such targets.
        p = replace(p, row_negatives=mixed_rows(p.candidates, p.mix, p.partners), partners=None)

    queries, itemsize = p.queries, p.queries.element_size()
    width = o.width + (p.row_negatives is not None)
    cell_bytes = 4 if itemsize == 4 else 4 + itemsize
    height = chunk_rows(o, cell_bytes * aligned(width) + 4 * o.copies.width)

    S = queries.new_empty(height, aligned(width), dtype=torch.float32)
    dS = S if itemsize == 4 else queries.new_empty(S.shape)
    weights = o.prob_scale / o.weight_norm * o.weights

    o.make_products()
    if p.link == "sigmoid":
        o.logsumexp.zero_(), o.mass.zero_()
    if o.bias_gradient is not None:
        o.bias_gradient.zero_()

    for rows in ranges(o.N, height):
        f, scores = o.copies.queries[rows], S[: rows.stop - rows.start, :width]
        for block in o.blocks:
            multiply(scores[:, block.columns], f, block.operand.T, add=False)

        if p.row_negatives is not None:
            scores[:, -1] = (queries[rows].float() * p.row_negatives[rows].float()).sum(1)

        out = dS[: len(scores), :width] if any(o.needs) else None
        statistics = o.logsumexp, o.mass, o.loss
        loss_rows(scores, o.scale, p, rows.start, weights, statistics, out, o.row_score_gradient)
        if out is not None:
            _differentiate(o, p.row_negatives, rows, out)

    if o.row_score_gradient is not None:
        o.row_score_gradient.mul_(_unscaled(o))

    factor = _factor(o)
    for block in o.blocks:
        if block.gradient is not None and block.product is not None:
            torch.mul(block.product[:, : o.D], factor, out=block.gradient)


def _differentiate(o: Operands, row_negatives: Tensor | None, rows: slice, dS: Tensor) -> None:
    """Adds the gradients that some rows of dS give."""
    f, factor, unscaled = o.p.queries[rows], _factor(o), _unscaled(o)

    for block in o.blocks:
        if block.product is not None:
            multiply(block.product, dS[:, block.columns].T, o.copies.queries[rows], add=rows.start > 0)

    if o.bias_gradient is not None:
        by_column = dS[:, : o.M].sum(0, dtype=torch.float32)
        o.bias_gradient.add_(by_column * unscaled)
    if o.row_negative_gradient is not None:
        o.row_negative_gradient[rows] = (factor * dS[:, -1:].float() * f.float()).to(f.dtype)

    if o.query_gradient is None and o.scale_gradient is None:
        return

    padded = f.new_empty(len(f), o.copies.width, dtype=torch.float32)
    for block in o.blocks:
        multiply(padded, dS[:, block.columns], block.operand, add=block.first > 0)
    product = padded[:, : o.D]
    if row_negatives is not None:
        product.addcmul_(dS[:, -1:].float(), row_negatives[rows].float())

    if o.scale_gradient is not None:
        o.scale_gradient[rows] = (product * f.float()).sum(1) * unscaled
    if o.query_gradient is not None:
        o.query_gradient[rows] = product.mul_(factor).to(f.dtype)


def _factor(o: Operands) -> Tensor:
    """What a product of dS has to be multiplied by to be a gradient."""
    return (o.scale * o.weight_norm / o.prob_scale).float()


def _unscaled(o: Operands) -> Tensor:
    """What dS has to be multiplied by."""
    return (o.weight_norm / o.prob_scale).float()
