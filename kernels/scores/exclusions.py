"""Biases, and cells that are removed from a tile: their score becomes -inf, so that E is 0 there.

Removed are the exact cells, which the row kernels compute one by one from float32 scores (targets, and the
diagonal where it is replaced), and the cells that a threshold, a mask or equal groups exclude.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastqt.kernels.cells import LOG2_E, NOWHERE


@triton.jit
def add_bias(
    x,  # (BLOCK_N, BLOCK_M): scores to base 2
    bias,  # (M,) float32, or None
    start_m,
    offs_m,
    mask_m,
):
    """Adds the bias of each column, to base 2."""
    if bias is not None:
        of_columns = tl.load(bias + start_m + offs_m, mask=mask_m, other=0.0) * LOG2_E
        x += of_columns[None, :]
    return x


@triton.jit
def load_thresholds(
    thresholds,  # (all rows,) float32, or None
    row,  # (BLOCK_N,)
    mask_n,
    row_norm,  # (BLOCK_N,): inverse norms, with which thresholds are those of cosines, or None
):
    """What the products of each row are compared with, which lack the row's inverse norm."""
    of_rows = None
    if thresholds is not None:
        of_rows = tl.load(thresholds + row, mask=mask_n, other=float("inf"))
        if row_norm is not None:
            of_rows /= row_norm
    return of_rows


@triton.jit
def exclude_similar(
    x,  # (BLOCK_N, BLOCK_M)
    products,  # (BLOCK_N, BLOCK_M): of the rows, times the inverse norms of columns
    row_thresholds,  # what load_thresholds returns
):
    """Removes cells whose similarity is above the threshold of their row; a NaN is above none."""
    if row_thresholds is not None:
        x = tl.where(products > row_thresholds[:, None], float("-inf"), x)
    return x


@triton.jit
def load_row_targets(
    targets,  # target_starts, target_columns, lowest_targets and highest_targets of the kernel
    row,  # (BLOCK_N,)
    mask_n,
):
    """For each row its lowest and highest target, the place of its first, and how many it has."""
    target_starts, _, lowest_targets, highest_targets = targets
    lowest = tl.load(lowest_targets + row, mask=mask_n, other=NOWHERE)
    highest = tl.load(highest_targets + row, mask=mask_n, other=-1)
    first = tl.load(target_starts + row, mask=mask_n, other=0)
    count = (tl.load(target_starts + row + 1, mask=mask_n, other=0) - first).to(tl.int32)
    return lowest, highest, first, count


@triton.jit
def exclude_groups_and_mask(
    x,  # (BLOCK_N, BLOCK_M)
    corner,  # of the tile: its first row among all rows, its first column among all columns
    offsets,  # offs_n and offs_m from there
    indices,  # the sums of both: row, (BLOCK_N,), and column, (BLOCK_M,)
    inside,  # mask_n and mask_m
    groups,  # query_groups and candidate_groups of the kernel, or None
    cell_mask,  # mask of the kernel, or None, and its strides
):
    """Removes cells whose query and candidate are of equal groups, and cells that the mask has.

    One condition is applied after another: a condition of all cells would take a register a cell.
    """
    first_n, first_m = corner
    offs_n, offs_m = offsets
    row, column = indices
    mask_n, mask_m = inside
    query_groups, candidate_groups = groups
    mask, stride_mask_n, stride_mask_m = cell_mask

    if query_groups is not None:
        of_row = tl.load(query_groups + row, mask=mask_n, other=0)
        of_column = tl.load(candidate_groups + column, mask=mask_m, other=0)
        x = tl.where(of_row[:, None] == of_column[None, :], float("-inf"), x)

    if mask is not None:
        start = mask + tl.cast(first_n, tl.int64) * stride_mask_n
        start += tl.cast(first_m, tl.int64) * stride_mask_m
        cell = offs_n[:, None] * stride_mask_n + offs_m[None, :] * stride_mask_m
        masked = tl.load(start + cell, mask=mask_n[:, None] & mask_m[None, :], other=0) != 0
        x = tl.where(masked, float("-inf"), x)
    return x


@triton.jit
def exclude_exact_cells(
    x,  # (BLOCK_N, BLOCK_M)
    corner,
    indices,
    row_targets,  # what load_row_targets returns, or None
    target_columns,  # (targets,) int64, or None
    EXCLUDE_DIAGONAL: tl.constexpr,
):
    """Removes targets, and the diagonal if EXCLUDE_DIAGONAL.

    Few tiles have such cells. In all others the loop below runs zero times.
    """
    BLOCK_N: tl.constexpr = x.shape[0]
    BLOCK_M: tl.constexpr = x.shape[1]
    first_n, left = corner
    row, column = indices

    # Turn k removes the k-th target of every row, turn -1 the diagonal.
    first_turn, turns = 0, 0
    if target_columns is not None:
        lowest, highest, first, count = row_targets
        in_tile = (lowest < left + BLOCK_M) & (highest >= left)
        turns = tl.max(tl.where(in_tile, count, 0), 0)
    if EXCLUDE_DIAGONAL:
        ahead = first_n - left
        first_turn = tl.where((ahead < BLOCK_M) & (ahead > -BLOCK_N), -1, 0)

    for turn in tl.range(first_turn, turns, num_stages=1):
        at = row
        if target_columns is not None:
            known = (turn >= 0) & (turn < count)
            target = tl.load(target_columns + first + turn, mask=known, other=-1).to(tl.int32)
            at = tl.where(turn < 0, row, target)

        if tl.max(((at >= left) & (at < left + BLOCK_M)).to(tl.int32), 0) > 0:
            x = tl.where(at[:, None] == column[None, :], float("-inf"), x)
    return x
