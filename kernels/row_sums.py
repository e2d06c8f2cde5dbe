"""From sums of exponentials by tiles to a row's loss, its statistics, and dL/dS at its exact cells."""

from __future__ import annotations

import triton
import triton.language as tl

from fastqt.kernels.cells import LN_2, NO_ROW_NEGATIVE


@triton.jit
def sum_tiles(tile_row_sums, i, mask, stride, blocks, BLOCK: tl.constexpr):
    """The sums of rows i over all blocks of columns, float64, from those of tiles, (blocks, rows) float32."""
    total = tl.zeros(i.shape, dtype=tl.float64)
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        at = tile_row_sums + b.to(tl.int64)[None, :] * stride + i[:, None]
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
    scores less the row's shift.
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
        # -inf is no cell, also where nothing else is left of a row.
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
