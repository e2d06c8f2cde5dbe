"""From rows of cosines to the losses of MixCSE's three blocks of scores.

A mixture of sentence j and the next one has the shares own_j and next_j, and norm 1. The scores of row i in
the three blocks, before the scale, are

    C_ij,  own_j C_ij + next_j C_i,j+1,  own_i C_ij + next_i C_i+1,j

with indices modulo N. The second block has a masked column i - 1, the third one i + 1, and both have a weight
that is added on the diagonal. No block is stored: the kernels here and those of the gradients compute each
score from neighbouring cosines.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import LN_2, LOG2_E
from fastqt.kernels.launch import block, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.sigmoid import log1p


@dataclass(frozen=True)
class Lines:
    """Some rows of the cosines C, whose indices are modulo N."""

    cosines: Tensor  # (lines, N) float32, not multiplied by the scale
    first: int  # which row the first line is


@dataclass(frozen=True)
class Mixtures:
    """What scores are computed from, besides the cosines."""

    own_columns: Tensor  # (N,) float32, the share of a candidate in its mixture, in block 2
    next_columns: Tensor  # and of the next candidate
    own_rows: Tensor  # (N,) float32, the share of a query in its mixture, in block 3
    next_rows: Tensor  # and of the next query
    scale: Tensor  # () float32
    weight: float  # added to the scores of a sentence with its own mixtures
    both: bool  # whether there is a third block
    excluded: bool  # whether masked cells are excluded; else their score is 0


@dataclass(frozen=True)
class RowSums:
    """Row statistics, (N,) float32."""

    largest: Tensor  # the largest score, to base 2, which is the shift of the exponentials
    others: Tensor  # the sum of all exponentials but the positive's
    factors: Tensor  # the row's weight, divided by the sum of all exponentials


@triton.jit
def mixed_exponents(own_share, near, next_share, far, top, on_diagonal, weight, WEIGHT: tl.constexpr):
    """Scores of a block with mixtures to base 2, less `top`, from the cosines with a mixture's two parts."""
    exponents = own_share * near + (next_share * far - top)
    if WEIGHT:
        exponents += tl.where(on_diagonal, weight, 0.0)
    return exponents


@planned
@triton.jit(do_not_specialize=["first_row"])
def three_block_rows_kernel(
    cosines,  # (lines, N) float32
    own_columns,  # (N,) float32, as the three others
    next_columns,
    own_rows,
    next_rows,
    scale,  # () float32
    row_weights,  # (N,) float64, read if WEIGHTED
    loss,  # (N,) float64
    largest,  # (N,) float32, written if WEIGHTED, as the following
    all_others,
    factors,
    weight,  # to base 2
    N,
    first_row,
    row_stride,
    BOTH: tl.constexpr,
    EXCLUDED: tl.constexpr,
    WEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One line per program, if there is a line below it: the row's loss, and its statistics if WEIGHTED."""
    at = tl.program_id(0).to(tl.int64)
    row = (first_row + at) % N
    before, after = (row + N - 1) % N, (row + 1) % N
    line, below = cosines + at * row_stride, cosines + (at + 1) % N * row_stride

    s = tl.load(scale) * LOG2_E
    if BOTH:
        own_row, next_row = s * tl.load(own_rows + row), s * tl.load(next_rows + row)
    masked_score = float("-inf") if EXCLUDED else 0.0

    top = float("-inf")
    others = tl.full((), 0.0, tl.float64)
    for start in range(0, N, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside, on_diagonal = j < N, j == row

        near = tl.load(line + j, mask=inside, other=0.0)
        right = tl.load(line + tl.where(j + 1 < N, j + 1, 0), mask=inside, other=0.0)

        own_column = s * tl.load(own_columns + j, mask=inside, other=0.0)
        next_column = s * tl.load(next_columns + j, mask=inside, other=0.0)

        first = tl.where(inside, s * near, float("-inf"))
        second = mixed_exponents(own_column, near, next_column, right, 0.0, on_diagonal, weight, WEIGHT)
        second = tl.where(inside, tl.where(j == before, masked_score, second), float("-inf"))

        highest = tl.maximum(first, second)
        if BOTH:
            far = tl.load(below + j, mask=inside, other=0.0)
            third = mixed_exponents(own_row, near, next_row, far, 0.0, on_diagonal, weight, WEIGHT)
            third = tl.where(inside, tl.where(j == after, masked_score, third), float("-inf"))
            highest = tl.maximum(highest, third)

        # Online softmax: what was summed so far is rescaled to the new maximum.
        higher = tl.maximum(top, tl.max(highest, 0))
        e = tl.where(on_diagonal, 0.0, tl.exp2(first - higher)) + tl.exp2(second - higher)
        if BOTH:
            e += tl.exp2(third - higher)
        others = others * tl.exp2(top - higher).to(tl.float64) + tl.sum(e, 0).to(tl.float64)
        top = higher

    gap = ((s * tl.load(line + row)).to(tl.float64) - top.to(tl.float64)) * LN_2
    # The loss is log(1 + others / exp(gap)). In this form it is precise near 0 as well as far from 0.
    odds = tl.log(others) - gap
    tl.store(loss + row, tl.where(odds > 0, odds, 0.0) + log1p(tl.exp(-tl.abs(odds))))

    if WEIGHTED:
        factor = tl.load(row_weights + row) / (tl.exp(gap) + others)
        tl.store(largest + row, top)
        tl.store(all_others + row, others.to(tl.float32))
        tl.store(factors + row, factor.to(tl.float32))


def three_block_rows(
    lines: Lines,
    mixtures: Mixtures,
    row_weights: Tensor | None,  # (N,) float64
    loss: Tensor,  # (N,) float64
    sums: RowSums | None,
) -> None:
    """Finds the losses of all rows with a line below theirs, and their statistics if `sums` is given."""
    held, N = lines.cosines.shape
    m = mixtures

    with on_device(loss):
        three_block_rows_kernel[(held if held == N else held - 1,)](
            lines.cosines,
            m.own_columns,
            m.next_columns,
            m.own_rows,
            m.next_rows,
            m.scale,
            row_weights,
            loss,
            *((None, None, None) if sums is None else (sums.largest, sums.others, sums.factors)),
            m.weight * LOG2_E.value,
            N,
            lines.first,
            lines.cosines.stride(0),
            BOTH=m.both,
            EXCLUDED=m.excluded,
            WEIGHT=m.weight != 0,
            WEIGHTED=sums is not None,
            BLOCK=block(N, 2048),
            num_warps=4,
            enable_fp_fusion=True,
        )
