"""From whole rows of float32 scores, which a plain product has written, to losses and dL/dS.

This is the path of dense and smoothed targets. They make every cell a target, and the scores kernel has an
exact cell for each target, so it does not serve them. A row is read whole, so its shift is its maximum.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import elements_of_program, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.sigmoid import log1p, log1p_to_one
from fastqt.problem import DIAGONALS, Problem

ZERO, KEEP = tl.constexpr(DIAGONALS.index("zero")), tl.constexpr(DIAGONALS.index("keep"))


@triton.jit
def cells_of(
    row,
    j,
    unscaled,  # the row of scores, its width, the scale; the bias and the number of candidates
    targets,  # starts, columns, weights; dense and its strides; background
    excluded,  # query_groups and candidate_groups; mask and its strides
    DIAGONAL: tl.constexpr,
):
    """Columns j of a row of T and of S, float32. S is -inf in excluded cells."""
    line, width, scale, bias, columns = unscaled
    starts, target_columns, weights, dense, dense_row_stride, dense_stride, background = targets
    query_groups, candidate_groups, mask, mask_row_stride, mask_stride = excluded

    inside = j < width
    candidate = inside & (j < columns)

    T = tl.zeros(j.shape, dtype=tl.float32)
    if dense is not None:
        cell = dense + row * dense_row_stride + j.to(tl.int64) * dense_stride
        T = tl.load(cell, mask=candidate, other=0.0).to(tl.float32)
    if starts is not None:
        for k in tl.range(tl.load(starts + row), tl.load(starts + row + 1), num_stages=1):
            weight = tl.load(weights + k).to(tl.float32)
            T += tl.where(j == tl.load(target_columns + k), weight, 0.0)
    if background is not None:
        T += tl.where(candidate, tl.load(background + row).to(tl.float32), 0.0)

    S = scale * tl.load(line + j, mask=inside, other=0.0)
    if bias is not None:
        S += tl.load(bias + j, mask=candidate, other=0.0)
    S = tl.where(inside, S, float("-inf"))
    if DIAGONAL != KEEP:
        S = tl.where(candidate & (j == row), 0.0 if DIAGONAL == ZERO else float("-inf"), S)
    if query_groups is not None:
        theirs = tl.load(candidate_groups + j, mask=candidate, other=0)
        S = tl.where(candidate & (theirs == tl.load(query_groups + row)) & (T == 0), float("-inf"), S)
    if mask is not None:
        cell = mask + row * mask_row_stride + j.to(tl.int64) * mask_stride
        S = tl.where(tl.load(cell, mask=candidate, other=0) != 0, float("-inf"), S)
    return T, S


@triton.jit
def store_row(line, dS, row, j, width, columns, DIAGONAL: tl.constexpr):
    """Stores columns j of a row of dS, with 0 where the score was replaced."""
    if DIAGONAL != KEEP:
        dS = tl.where((j == row) & (j < columns), 0.0, dS)
    tl.store(line + j, dS.to(line.dtype.element_ty), mask=j < width)


@planned
@triton.jit
def loss_rows_kernel(
    scores,  # (rows, width) float32, not multiplied by the scale
    scale,  # () float32
    row_weights,  # (N,) float64
    logsumexp,  # (N,) float64, as the two following; a sigmoid has a loss only
    mass,
    loss,
    columns,  # M, of width
    width,
    first_row,
    row_stride,
    gradient_row_stride,
    dense_row_stride,
    dense_stride,
    mask_row_stride,
    mask_stride,
    SIGMOID: tl.constexpr,
    DIAGONAL: tl.constexpr,
    BLOCK: tl.constexpr,
    gradients=None,  # (rows, width), dL/dS; may be the memory of float32 scores
    target_starts=None,  # (N + 1,) int64, given with the two following
    target_columns=None,  # (targets,) int64, -1 for none
    target_weights=None,  # (targets,) float64
    dense=None,  # (N, M), targets
    background=None,  # (N,) float64, a weight of every cell of the row
    bias=None,  # (M,) float32
    query_groups=None,  # (N,) int64
    candidate_groups=None,  # (M,) int64
    mask=None,  # (N, M) bool
    row_scores=None,  # (N,) float32: of one further cell of each row
    row_score_gradients=None,  # (N,) float32, given with the scores, and stored where gradients are
):
    """One row per program: its loss, and dS = w (rho P - T).

    The form in which dS is computed does not cancel where P is near T.
    """
    at = tl.program_id(0).to(tl.int64)
    row = first_row + at
    unscaled = scores + at * row_stride, width, tl.load(scale), bias, columns
    targets = target_starts, target_columns, target_weights, dense, dense_row_stride, dense_stride, background
    excluded = query_groups, candidate_groups, mask, mask_row_stride, mask_stride
    line = gradients + at * gradient_row_stride if gradients is not None else gradients
    w = tl.load(row_weights + row)

    # No cell of a sigmoid depends on others: one walk gives the losses and the gradients.
    if SIGMOID:
        total = tl.full((), 0.0, tl.float64)

        if row_scores is not None:
            row_score = tl.load(row_scores + row).to(tl.float64)
            row_score_e = tl.exp(-tl.abs(row_score))
            total += tl.maximum(row_score, 0.0) + log1p(row_score_e)
            if gradients is not None:
                row_score_gradient = w * tl.where(row_score > 0, 1.0, row_score_e) / (1.0 + row_score_e)
                tl.store(row_score_gradients + row, row_score_gradient.to(tl.float32))

        for start in range(0, width, BLOCK):
            j = start + tl.arange(0, BLOCK)
            T, x = cells_of(row, j, unscaled, targets, excluded, DIAGONAL)
            e = tl.exp(-tl.abs(x))
            softplus = tl.where(x > 0, x, 0.0) + log1p_to_one(e)
            total += tl.sum(softplus - tl.where(T > 0, T * x, 0.0), 0).to(tl.float64)

            if gradients is not None:
                above = tl.where(x > 0, (1.0 - T) - T * e, (1.0 - T) * e - T)
                dS = w.to(tl.float32) * (above / (1.0 + e))
                store_row(line, dS, row, j, width, columns, DIAGONAL)

        tl.store(loss + row, total)
        return

    # Online softmax: sums over cells with targets and over all others, both relative to the current maximum.
    top = float("-inf")
    of_targets = tl.full((), 0.0, tl.float64)
    of_others = tl.full((), 0.0, tl.float64)

    if row_scores is not None:
        top = tl.load(row_scores + row)
        of_others = tl.where(top == float("-inf"), 0.0, 1.0).to(tl.float64)

    rho = tl.full((), 0.0, tl.float64)
    linear = tl.full((), 0.0, tl.float64)
    for start in range(0, width, BLOCK):
        j = start + tl.arange(0, BLOCK)
        T, x = cells_of(row, j, unscaled, targets, excluded, DIAGONAL)
        is_target = T > 0
        rho += tl.sum(T, 0).to(tl.float64)
        entropy = T * tl.log(tl.where(is_target, T, 1.0))
        linear += tl.sum(tl.where(is_target, entropy - T * x, 0.0), 0).to(tl.float64)

        higher = tl.maximum(top, tl.max(x, 0))
        # A row may begin with cells that are all excluded: there is nothing to rescale yet.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        rescale = tl.where(top == float("-inf"), 0.0, tl.exp(top - shift)).to(tl.float64)
        e = tl.exp(x - shift)
        of_targets = of_targets * rescale + tl.sum(tl.where(is_target, e, 0.0), 0).to(tl.float64)
        of_others = of_others * rescale + tl.sum(tl.where(is_target, 0.0, e), 0).to(tl.float64)
        top = higher
    shift = tl.where(top == float("-inf"), 0.0, top)

    total = of_targets + of_others
    lse = shift.to(tl.float64) + tl.log(total)
    tl.store(logsumexp + row, lse)
    tl.store(mass + row, rho)
    tl.store(loss + row, tl.where(rho > 0, rho * lse + linear, 0.0))

    if gradients is not None:
        # dS needs the sums of the whole row, so its scores are read a second time.
        factor = tl.where(rho > 0, w / total, 0.0).to(tl.float32)
        rho32 = rho.to(tl.float32)
        of_targets32, of_others32 = of_targets.to(tl.float32), of_others.to(tl.float32)

        if row_scores is not None:
            row_exponential = tl.exp(tl.load(row_scores + row) - shift)
            row_score_gradient = tl.where(rho > 0, factor * rho32 * row_exponential, 0.0)
            tl.store(row_score_gradients + row, row_score_gradient)

        for start in range(0, width, BLOCK):
            j = start + tl.arange(0, BLOCK)
            T, x = cells_of(row, j, unscaled, targets, excluded, DIAGONAL)
            e = tl.exp(x - shift)
            exact = (rho32 - T) * e - T * (of_others32 + (of_targets32 - e))
            # A row without targets has no gradient, also where a score of it is NaN.
            dS = tl.where(rho > 0, factor * tl.where(T > 0, exact, rho32 * e), 0.0)
            store_row(line, dS, row, j, width, columns, DIAGONAL)


def loss_rows(
    scores: Tensor,  # (rows, width) float32, not scaled yet
    scale: Tensor,  # () float32
    p: Problem,
    first_row: int,
    row_weights: Tensor,  # (N,) float64
    statistics: tuple[Tensor, Tensor, Tensor],  # logsumexp and mass, of a softmax, and loss, (N,) float64
    gradients: Tensor | None,  # (rows, width)
    row_score_gradients: Tensor | None = None,  # (N,) float32, given with the problem's row scores
) -> None:
    """Finds losses and row statistics of some rows, and their dL/dS where `gradients` is given."""
    rows, width = scores.shape
    t = p.targets

    with on_device(scores):
        loss_rows_kernel[(rows,)](
            scores,
            scale,
            row_weights,
            *statistics,
            p.candidates.shape[0],
            width,
            first_row,
            scores.stride(0),
            0 if gradients is None else gradients.stride(0),
            *((0, 0) if t.dense is None else t.dense.stride()),
            *((0, 0) if p.mask is None else p.mask.stride()),
            SIGMOID=p.link == "sigmoid",
            DIAGONAL=DIAGONALS.index(p.diagonal),
            gradients=gradients,
            target_starts=t.starts,
            target_columns=t.columns,
            target_weights=t.weights,
            dense=t.dense,
            background=t.background,
            bias=p.bias,
            query_groups=p.query_groups,
            candidate_groups=p.candidate_groups,
            mask=p.mask,
            row_scores=p.row_scores,
            row_score_gradients=row_score_gradients,
            **elements_of_program(width, 2048, 8),
            enable_fp_fusion=True,
        )
