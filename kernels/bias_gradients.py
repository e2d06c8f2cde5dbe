"""Gradients of the candidates' biases, from sums over columns of E and the coefficients of the targets."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import ByColumn
from fastqt.kernels.launch import cdiv, on_device
from fastqt.kernels.plan import planned

BIASES_AT_ONCE = 128  # of a program


@triton.jit
def targets_of(j, mask, by_column):
    """The first of the targets of columns j, and how many they are: in the lists, or of a band's offsets."""
    column_starts, _, _, offsets, K = by_column
    first, count = j * 0, j * 0 + K
    if offsets is None:
        first = tl.load(column_starts + j, mask=mask, other=0)
        count = tl.load(column_starts + j + 1, mask=mask, other=0) - first
    return first, count


@triton.jit
def place_of(j, k, mask, by_column):
    """Places of targets in the order of rows, negative or beyond the last where there are none."""
    _, column_targets, _, offsets, K = by_column
    if offsets is not None:
        place = (j - tl.load(offsets + k, mask=mask, other=0)) * K + k
    else:
        place = tl.load(column_targets + k, mask=mask, other=-1)
    return place


@planned
@triton.jit
def bias_gradient_kernel(
    column_sums,  # (columns,) float32: of E over all rows, weighted
    weight_norm,
    target_coefficients,
    bias_gradient,  # (columns,) float32
    prob_scale,
    K,
    targets,
    columns,
    BLOCK: tl.constexpr,
    column_starts=None,
    column_targets=None,
    target_rows=None,
    offsets=None,
):
    """Many candidates per program.

    The gradient of a bias is db_j = weight_norm / prob_scale * column_sums_j + sum over its targets of c.
    """
    j = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = j < columns
    factor = (tl.load(weight_norm) / prob_scale).to(tl.float32)
    gradient = factor * tl.load(column_sums + j, mask=inside, other=0.0)

    by_column = column_starts, column_targets, target_rows, offsets, K
    first, count = targets_of(j, inside, by_column)

    # Columns have different numbers of targets: all of a program's take as many turns as the longest.
    for k in range(0, tl.max(count, 0)):
        listed = inside & (k < count)
        t = place_of(j, first + k, listed, by_column)
        there = listed & (t >= 0) & (t < targets)
        gradient += tl.load(target_coefficients + t, mask=there, other=0.0)

    tl.store(bias_gradient + j, gradient, mask=inside)


def bias_gradient_epilogue(
    column_sums: Tensor,  # (M,) float32
    weight_norm: Tensor,
    prob_scale: float,
    by_column: ByColumn,
    coefficients: Tensor,
    bias_gradient: Tensor,  # (M,) float32
) -> None:
    """Finishes the gradients of all biases."""
    (columns,) = column_sums.shape
    with on_device(column_sums):
        bias_gradient_kernel[(cdiv(columns, BIASES_AT_ONCE),)](
            column_sums,
            weight_norm,
            coefficients,
            bias_gradient,
            prob_scale,
            by_column.count,
            len(coefficients),
            columns,
            BLOCK=BIASES_AT_ONCE,
            **by_column.operands,
            num_warps=4,
            enable_fp_fusion=True,
        )
