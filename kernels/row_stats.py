"""Row statistics of a softmax: from sums of exponentials to losses, and to dL/dS at the exact cells."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import LN_2, NO_ROW_NEGATIVE, ROW_SCORE, ExactCells, RowState
from fastqt.kernels.launch import ROWS_AT_ONCE, TILES_AT_ONCE, cdiv, on_device
from fastqt.kernels.plan import planned

# A row sum between exp(-40) and exp(80), and its terms that matter, are in the range of float32 and bfloat16.
LEAST, MOST = tl.constexpr(4.2e-18), tl.constexpr(5.5e34)
# The same where E is stored times inverse norms, of which none is larger than 1e12.
MOST_OF_COSINES = tl.constexpr(1e24)


@triton.jit
def sum_tiles(tile_row_sums, i, mask, rows, blocks, BLOCK: tl.constexpr):
    """The sums of rows i over all blocks of columns, float64, from those of tiles, (blocks, rows) float32."""
    total = tl.zeros(i.shape, dtype=tl.float64)
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        at = tile_row_sums + b.to(tl.int64)[None, :] * rows + i[:, None]
        of_tiles = tl.load(at, mask=mask[:, None] & (b < blocks)[None, :], other=0.0)
        total += tl.sum(of_tiles.to(tl.float64), 1)
    return total


@triton.jit
def load_target(
    place,  # (rows,), in the order of rows
    listed,  # (rows,): whether the row has as many targets
    targets,  # target_columns, target_weights and target_scores
):
    """One target of each row: whether there is one, its weight, and its score in float64."""
    target_columns, target_weights, target_scores = targets
    is_target = listed & (tl.load(target_columns + place, mask=listed, other=-1) >= 0)
    T = tl.load(target_weights + place, mask=is_target, other=0.0)
    return is_target, T, tl.load(target_scores + place, mask=is_target, other=0.0).to(tl.float64)


@triton.jit
def conclude_rows(
    row,  # (rows,), among all rows
    inside,  # (rows,): which of them are concluded
    shift_log2,  # (rows,) float32: the rows' shifts
    others,  # (rows,) float64: the sums of E
    exact,  # target_starts, target_columns, target_weights and target_scores; zeroed; row_negative_scores
    row_weights,
    outputs,  # logsumexp, mass, loss and factors; target_coefficients; row_negative_coefficients
    ZEROED: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    LOG_SUM_EXP: tl.constexpr,
):
    """Stores the losses and statistics of rows, and dL/dS at their exact cells.

    That is w (rho p - T), in a form that does not cancel where rho p is near T. All exponentials are of
    scores less the row's shift. Returned are the sums of all exponentials, and the masses.
    """
    target_starts, target_columns, target_weights, target_scores, zeroed, row_negative_scores = exact
    logsumexp, mass, loss, factors, target_coefficients, row_negative_coefficients = outputs

    shift = shift_log2.to(tl.float64) * LN_2

    if ZEROED:
        counts = tl.load(zeroed + row, mask=inside, other=0) != 0
        others += tl.where(counts, tl.exp(-shift), 0.0)

    of_row_negative = tl.zeros(row.shape, dtype=tl.float64)
    if ROW_NEGATIVE != NO_ROW_NEGATIVE:
        row_negative_score = tl.load(row_negative_scores + row, mask=inside, other=0.0).to(tl.float64)
        of_row_negative = tl.exp(row_negative_score - shift)
        if ROW_NEGATIVE == ROW_SCORE:  # -inf is no cell, also where nothing else is left of a row
            of_row_negative = tl.where(row_negative_score == float("-inf"), 0.0, of_row_negative)
        others += of_row_negative

    first = tl.load(target_starts + row, mask=inside, other=0)
    count = tl.load(target_starts + row + 1, mask=inside, other=0) - first
    most = tl.max(count, 0)

    rho = tl.full(row.shape, 1.0 if LOG_SUM_EXP else 0.0, dtype=tl.float64)
    linear = tl.zeros(row.shape, dtype=tl.float64)
    of_targets = tl.zeros(row.shape, dtype=tl.float64)

    targets = target_columns, target_weights, target_scores

    for k in range(0, most):
        is_target, T, score = load_target(first + k, inside & (k < count), targets)
        rho += T
        linear += T * (tl.log(tl.where(is_target, T, 1.0)) - score)
        of_targets += tl.where(is_target, tl.exp(score - shift), 0.0)

    total = others + of_targets
    lse = shift + tl.log(total)
    row_loss = tl.where(rho > 0, rho * lse + linear, 0.0)

    has_gradient = rho > 0
    if LOG_SUM_EXP:  # Nothing can be learnt from a row that has been excluded as a whole.
        has_gradient = total != 0

    # dL/dS needs the sums of all exponentials, so the targets are walked a second time.
    w = tl.load(row_weights + row, mask=inside, other=0.0)
    for k in range(0, most):
        listed = inside & (k < count)
        is_target, T, score = load_target(first + k, listed, targets)

        e = tl.where(is_target, tl.exp(score - shift), 0.0)
        c = w * ((rho - T) * e - T * (others + (of_targets - e))) / total
        c = tl.where(is_target, c, 0.0)
        tl.store(target_coefficients + first + k, c.to(tl.float32), mask=listed)

    if ROW_NEGATIVE != NO_ROW_NEGATIVE:
        c = tl.where(has_gradient, w * rho * of_row_negative / total, 0.0)
        tl.store(row_negative_coefficients + row, c.to(tl.float32), mask=inside)

    tl.store(logsumexp + row, lse, mask=inside)
    tl.store(mass + row, rho, mask=inside)
    tl.store(loss + row, row_loss, mask=inside)
    tl.store(factors + row, tl.where(has_gradient, w * rho / total, 0.0), mask=inside)
    return total, rho


@planned
@triton.jit(do_not_specialize=["rows", "blocks", "first_row"])
def row_stats_kernel(
    tile_row_sums,  # (blocks of columns, rows) float32: sums of E
    row_shift_log2,  # (N,) float32
    target_starts,
    target_columns,
    target_weights,  # (targets,) float64
    target_scores,
    zeroed,  # (N,) bool
    row_negative_scores,
    row_weights,  # (N,) float64
    shift_overflowed,  # (N,) int32, written
    repairs_done,  # (N,) int32, set to 0 for the launch that repairs
    logsumexp,  # (N,) float64
    mass,
    loss,
    factors,  # (N,) float64: w rho / sum of all exponentials
    target_coefficients,  # (targets,) float32
    row_negative_coefficients,  # (N,) float32
    rows,
    blocks,
    first_row,
    ZEROED: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    LOG_SUM_EXP: tl.constexpr,  # rows have mass 1 and no targets
    COSINES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A few rows per program: their losses, dL/dS at their exact cells, and whether their shift will do."""
    i = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = first_row + i
    inside = i < rows

    others = sum_tiles(tile_row_sums, i, inside, rows, blocks, BLOCK)
    shift_log2 = tl.load(row_shift_log2 + row, mask=inside, other=0.0)

    exact = target_starts, target_columns, target_weights, target_scores, zeroed, row_negative_scores
    outputs = logsumexp, mass, loss, factors, target_coefficients, row_negative_coefficients
    total, rho = conclude_rows(
        row, inside, shift_log2, others, exact, row_weights, outputs, ZEROED, ROW_NEGATIVE, LOG_SUM_EXP
    )

    # Beyond these bounds the sum, or E as it is stored, may have overflowed or underflowed.
    sound = ((total > LEAST) & (total < (MOST_OF_COSINES if COSINES else MOST))) | (rho == 0)
    tl.store(shift_overflowed + row, tl.where(sound, 0, 1), mask=inside)
    tl.store(repairs_done + row, tl.zeros(row.shape, dtype=tl.int32), mask=inside)


def row_stats(tile_row_sums: Tensor, cells: ExactCells, state: RowState, first_row: int) -> None:
    """Finds losses, statistics and coefficients of exact cells of some rows, once the sums of E are known.

    It flags the rows whose shift was too far off.
    """
    blocks, rows = tile_row_sums.shape

    with on_device(tile_row_sums):
        row_stats_kernel[(cdiv(rows, ROWS_AT_ONCE),)](
            tile_row_sums,
            state.row_shift_log2,
            *cells.of_rows,
            state.weights,
            state.shift_overflowed,
            state.repairs_done,
            *state.statistics,
            *cells.all_coefficients,
            rows,
            blocks,
            first_row,
            ZEROED=cells.zeroed is not None,
            ROW_NEGATIVE=cells.row_negative_kind,
            LOG_SUM_EXP=state.of_log_sum_exp,
            COSINES=state.of_cosines,
            BLOCK_ROWS=ROWS_AT_ONCE,
            BLOCK=TILES_AT_ONCE,
            num_warps=4,
            enable_fp_fusion=True,
        )
