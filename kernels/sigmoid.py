"""The sigmoid loss of a cell, log(1 + exp S) - T S: its functions, and row statistics.

The loss of a cell does not depend on other cells, so there are no shifts and nothing to normalise by.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from fastqt.kernels.cells import LN_2, NO_ROW_NEGATIVE, ExactCells, RowState
from fastqt.kernels.launch import INTERPRETED, ROWS_AT_ONCE, TILES_AT_ONCE, cdiv, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.row_sums import load_target, sum_tiles

EXTERN = tl.constexpr(not INTERPRETED)  # the interpreter does not have the functions of libdevice


@triton.jit
def sigmoids(
    exponent,  # scores to base 2
    e,  # 2^-|exponent|
):
    """1 / (1 + 2^-exponent), with a small relative error where it is near 0 too."""
    numerator = tl.where(exponent > 0, 1.0, e)
    # Denominators are in 1..2. A division for all denominators takes three times as many instructions.
    if EXTERN:
        return libdevice.fast_dividef(numerator, 1.0 + e)
    return numerator / (1.0 + e)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, corrected for the rounding of 1 + x."""
    u = 1.0 + x
    rounded = u - 1.0
    return tl.where(rounded > 0, tl.log(u) * (x / tl.where(rounded > 0, rounded, 1.0)), x)


@triton.jit
def log1p_to_one(x):
    """log(1 + x) for float32 x from 0 to 1, by one division and in fewer registers.

    It is 2 atanh(x / (2 + x)), which keeps the digits of a small x.
    """
    z = x / (2.0 + x)
    u = z * z
    series = (((1.4078889e-1 * u + 1.3982579e-1) * u + 2.0012298e-1) * u + 3.3333161e-1) * u
    return 2.0 * (z + z * series)


@triton.jit
def joined(a, b):
    """p such that 1 + p = (1 + a) (1 + b), which keeps the digits of a small a or b.

    It is the same to the bit with a and b exchanged, as two threads have them that both find the result.
    """
    return tl.fma(a, b, a + b)


@triton.jit
def softplus_sums(
    exponent,  # (rows, columns): scores to base 2
    e,  # (rows, columns): 2^-|exponent|
):
    """sum_j log(1 + exp S_ij), (rows,), from log(1 + exp S) = max(S, 0) + log(1 + e).

    One logarithm of a product of 1 + e serves 64 cells, whose product is at most 2^64.
    """
    rows: tl.constexpr = e.shape[0]
    joint: tl.constexpr = min(e.shape[1], 64)
    p = tl.reduce(e.reshape(rows, e.shape[1] // joint, joint), 2, joined)
    return tl.sum(log1p(p), 1) + LN_2 * tl.sum(tl.maximum(exponent, 0.0), 1)


@planned
@triton.jit(do_not_specialize=["rows", "blocks", "first_row"])
def sigmoid_row_stats_kernel(
    tile_row_sums,  # (blocks of columns, rows) float32: sums of log(1 + exp S)
    target_starts,
    target_columns,
    target_weights,  # (targets,) float64
    target_scores,
    zeroed,  # (N,) bool
    row_negative_scores,
    row_weights,  # (N,) float64
    loss,  # (N,) float64
    target_coefficients,  # (targets,) float32
    row_negative_coefficients,  # (N,) float32
    rows,
    blocks,
    first_row,
    ZEROED: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A few rows per program: their losses, and dL/dS at their exact cells.

    That is w (p - T), in a form that does not cancel where p is near T.
    """
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = first_row + i
    inside = i < rows

    total = sum_tiles(tile_row_sums, i, inside, rows, blocks, BLOCK)
    if ZEROED:
        counts = tl.load(zeroed + row, mask=inside, other=0) != 0
        total += tl.where(counts, LN_2, 0.0)

    w = tl.load(row_weights + row, mask=inside, other=0.0)
    if ROW_NEGATIVE != NO_ROW_NEGATIVE:
        x = tl.load(row_negative_scores + row, mask=inside, other=0.0).to(tl.float64)
        e = tl.exp(-tl.abs(x))
        total += tl.maximum(x, 0.0) + log1p(e)
        c = w * tl.where(x > 0, 1.0, e) / (1.0 + e)
        tl.store(row_negative_coefficients + row, c.to(tl.float32), mask=inside)

    first = tl.load(target_starts + row, mask=inside, other=0)
    count = tl.load(target_starts + row + 1, mask=inside, other=0) - first
    for k in range(0, tl.max(count, 0)):
        listed = inside & (k < count)
        is_target, T, x = load_target(first + k, listed, (target_columns, target_weights, target_scores))

        e = tl.exp(-tl.abs(x))
        # The loss is log(1 + exp x) - T x, and its derivative is (1 - T) p - T (1 - p).
        positive = tl.where(x > 0, (1.0 - T) * x, -T * x)
        total += tl.where(is_target, positive + log1p(e), 0.0)

        c = w * tl.where(x > 0, (1.0 - T) - T * e, (1.0 - T) * e - T) / (1.0 + e)
        tl.store(target_coefficients + first + k, tl.where(is_target, c, 0.0).to(tl.float32), mask=listed)

    tl.store(loss + row, total, mask=inside)


def sigmoid_row_stats(tile_row_sums: Tensor, cells: ExactCells, state: RowState, first_row: int) -> None:
    """Finds losses and coefficients of exact cells of some rows, once the sums over other cells are known."""
    blocks, rows = tile_row_sums.shape
    _, _, scores, _, coefficients = cells.row_negative_tensors

    with on_device(tile_row_sums):
        sigmoid_row_stats_kernel[(cdiv(rows, ROWS_AT_ONCE),)](
            tile_row_sums,
            cells.starts,
            cells.columns,
            cells.weights,
            cells.scores,
            cells.zeroed,
            scores,
            state.weights,
            state.loss,
            cells.coefficients,
            coefficients,
            rows,
            blocks,
            first_row,
            ZEROED=cells.zeroed is not None,
            ROW_NEGATIVE=cells.row_negative_kind,
            BLOCK_ROWS=ROWS_AT_ONCE,
            BLOCK=TILES_AT_ONCE,
            num_warps=4,
            enable_fp_fusion=True,
        )
