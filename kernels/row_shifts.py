"""The first kernel of a softmax: scores of each row's exact cells, and the shift of its exponentials.

A shift only has to be near the largest score of its row: the exact cells and a sample of the others give it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import (
    LOG2_E,
    MIXED_ROW_NEGATIVE,
    NO_ROW_NEGATIVE,
    NOWHERE,
    ROW_SCORE,
    ExactCells,
    RowState,
    row_negative_part,
)
from fastqt.kernels.launch import block, on_device
from fastqt.kernels.plan import planned
from fastqt.problem import Problem


@planned
@triton.jit(do_not_specialize=["rows", "columns"])
def row_shifts_kernel(
    queries,
    candidates,
    scale,
    bias,  # (M,) float32, added to the scores of targets, if BIAS
    target_starts,
    listed_columns,  # (targets,) int64
    target_weights,  # (targets,) float64
    query_groups,  # (N,) int32, if GROUPS
    candidate_groups,  # (M,) int32
    mask,  # (N, M) bool, if MASK
    sample_max_log2,  # (SAMPLE_TILES, N) float32: the largest scores in tiles of a sample of candidates
    row_negatives,
    partners,
    target_columns,  # (targets,) int64, written as the following
    target_rows,  # (targets,) int64
    target_scores,  # (targets,) float32
    sound,  # (N,) bool
    zeroed,  # (N,) bool
    row_negative_scores,  # (N,) float32, read if they are given
    row_negative_norms,  # (N,) float32, written unless they are read
    lowest_targets,  # (N,) int32
    highest_targets,  # (N,) int32
    exact_max_log2,  # (N,) float32
    row_shift_log2,  # (N,) float32
    repairs_done,  # (N,) int32, set to 0 for the launch that concludes rows
    mix,
    rows,  # N
    columns,  # M
    width,
    query_row_stride,
    query_stride,
    candidate_row_stride,
    candidate_stride,
    row_negative_row_stride,
    row_negative_stride,
    mask_row_stride,
    mask_stride,
    BIAS: tl.constexpr,
    REPLACED: tl.constexpr,
    ZEROED: tl.constexpr,
    GROUPS: tl.constexpr,
    MASK: tl.constexpr,
    SAMPLE_TILES: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    LOG_SUM_EXP: tl.constexpr,
    BLOCK: tl.constexpr,
    query_inverse_norms=None,  # (N,) float32, given with the following: scores are cosines
    candidate_inverse_norms=None,  # (M,) float32
    thresholds=None,  # (N,) float32, with which row negatives that are embeddings are compared
):
    """One row per program: scores of its exact cells, and the shift of its exponentials.

    The shift is the largest score among the exact cells and the sample. A row without targets has a shift of
    +inf, so that E = 0, unless its logsumexp is wanted: without exact cells and a sample its shift is then 0.
    A target of weight 0 is ignored. A target is not sound if its weight is negative or NaN, if its column
    does not exist or is masked, or if it is on a diagonal that is replaced. With inverse norms, the norms of
    given row negatives are read.
    """
    # Offsets within a row have 64 bits: the rows of a transposed matrix are as long as the matrix.
    query_stride, candidate_stride = tl.cast(query_stride, tl.int64), tl.cast(candidate_stride, tl.int64)
    row_negative_stride = tl.cast(row_negative_stride, tl.int64)

    i = tl.program_id(0).to(tl.int64)

    s = tl.load(scale)
    if query_inverse_norms is not None:
        s *= tl.load(query_inverse_norms + i)

    f = queries + i * query_row_stride
    first, last = tl.load(target_starts + i), tl.load(target_starts + i + 1)

    exact_max = float("-inf")
    lowest, highest = tl.cast(NOWHERE, tl.int32), tl.cast(-1, tl.int32)
    faults = tl.cast(0, tl.int32)

    for t in range(first, last):
        at = tl.load(listed_columns + t)
        weight = tl.load(target_weights + t)
        there = (at >= 0) & (at < columns)

        possible = there
        if REPLACED:
            possible = possible & (at != i)
        if MASK:
            cell = mask + i * mask_row_stride + at * mask_stride
            possible = possible & (tl.load(cell, mask=there, other=0) == 0)
        faults += tl.where((weight == 0) | ((weight > 0) & possible), 0, 1)

        # Later kernels read the column from here: -1 is no target, so they need not look at its weight.
        at = tl.where(there & (weight != 0), at, -1)
        tl.store(target_columns + t, at)
        tl.store(target_rows + t, i)

        dot = tl.zeros((BLOCK,), dtype=tl.float32)
        if at >= 0:
            for start in range(0, width, BLOCK):
                d = start + tl.arange(0, BLOCK)
                a = tl.load(f + d * query_stride, mask=d < width, other=0.0)
                g = candidates + at * candidate_row_stride
                b = tl.load(g + d * candidate_stride, mask=d < width, other=0.0)
                dot += a.to(tl.float32) * b.to(tl.float32)

        score = s * tl.sum(dot, 0)
        if candidate_inverse_norms is not None:
            score *= tl.load(candidate_inverse_norms + at, mask=at >= 0, other=0.0)
        if BIAS:
            score += tl.load(bias + at, mask=at >= 0, other=0.0)

        tl.store(target_scores + t, score)
        if at >= 0:
            exact_max = tl.maximum(exact_max, score)
            lowest = tl.minimum(lowest, at.to(tl.int32))
            highest = tl.maximum(highest, at.to(tl.int32))

    tl.store(sound + i, faults == 0)

    if ZEROED:
        counts = i < columns

        if GROUPS:
            group = tl.load(candidate_groups + i, mask=counts, other=0)
            counts = counts & (tl.load(query_groups + i) != group)
        if MASK:
            at = mask + i * mask_row_stride + i * mask_stride
            counts = counts & (tl.load(at, mask=counts, other=0) == 0)

        tl.store(zeroed + i, counts)
        exact_max = tl.where(counts, tl.maximum(exact_max, 0.0), exact_max)

    if ROW_NEGATIVE == ROW_SCORE:
        exact_max = tl.maximum(exact_max, tl.load(row_negative_scores + i))
    elif ROW_NEGATIVE != NO_ROW_NEGATIVE:
        dot = tl.zeros((BLOCK,), dtype=tl.float32)
        square = tl.zeros((BLOCK,), dtype=tl.float32)

        for start in range(0, width, BLOCK):
            d = start + tl.arange(0, BLOCK)
            a = tl.load(f + d * query_stride, mask=d < width, other=0.0).to(tl.float32)
            r = row_negative_part(
                row_negatives,
                partners,
                mix,
                i,
                d,
                d < width,
                row_negative_row_stride,
                row_negative_stride,
                ROW_NEGATIVE,
                candidate_inverse_norms,
            )
            dot += a * r
            square += r * r

        if ROW_NEGATIVE != MIXED_ROW_NEGATIVE and query_inverse_norms is not None:
            norm = tl.load(row_negative_norms + i)
        else:
            norm = 1.0
            if ROW_NEGATIVE == MIXED_ROW_NEGATIVE:
                norm = tl.maximum(tl.sqrt(tl.sum(square, 0)), 1e-12)
            tl.store(row_negative_norms + i, norm)

        product = tl.sum(dot, 0) / norm
        score = s * product
        if thresholds is not None:
            similar = product
            if query_inverse_norms is not None:
                similar *= tl.load(query_inverse_norms + i)
            score = tl.where(similar > tl.load(thresholds + i), float("-inf"), score)
        tl.store(row_negative_scores + i, score)
        exact_max = tl.maximum(exact_max, score)

    exact_max *= LOG2_E
    shift = exact_max
    at = i
    for _ in tl.static_range(SAMPLE_TILES):
        shift = tl.maximum(shift, tl.load(sample_max_log2 + at))
        at += rows

    tl.store(exact_max_log2 + i, exact_max)

    if LOG_SUM_EXP:
        shift = tl.where(shift == float("-inf"), 0.0, shift)
    else:
        shift = tl.where(highest >= 0, shift, float("inf"))
    tl.store(row_shift_log2 + i, shift)
    tl.store(repairs_done + i, 0)

    tl.store(lowest_targets + i, lowest)
    tl.store(highest_targets + i, highest)


def choose_row_shifts(
    p: Problem,
    scale: Tensor,  # () float32
    groups: tuple[Tensor, Tensor] | tuple[None, None],  # (N,) and (M,) int32
    cells: ExactCells,
    state: RowState,
    sampled: Tensor | None,  # (tiles, N) float32: the largest scores in tiles of a sample, to base 2
    inverse_norms: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),  # (N,) and (M,) float32
) -> None:
    """Finds the exact cells, their scores, and from these the shifts of rows."""
    queries, candidates, mask = p.queries, p.candidates, p.mask
    N, D = queries.shape

    matrix, partners, scores, norms, _ = cells.row_negative_tensors

    with on_device(queries):
        row_shifts_kernel[(N,)](
            queries,
            candidates,
            scale,
            p.bias,
            *p.targets.compressed(),
            *groups,
            mask,
            sampled,
            matrix,
            partners,
            cells.columns,
            cells.rows,
            cells.scores,
            cells.sound,
            cells.zeroed,
            scores,
            norms,
            cells.lowest,
            cells.highest,
            state.exact_max_log2,
            state.row_shift_log2,
            state.repairs_done,
            cells.mix,
            N,
            candidates.shape[0],
            D,
            *queries.stride(),
            *candidates.stride(),
            *cells.row_negative_strides,
            *((0, 0) if mask is None else mask.stride()),
            BIAS=p.bias is not None,
            REPLACED=p.diagonal != "keep",
            ZEROED=cells.zeroed is not None,
            GROUPS=p.query_groups is not None,
            MASK=mask is not None,
            SAMPLE_TILES=0 if sampled is None else len(sampled),
            ROW_NEGATIVE=cells.row_negative_kind,
            LOG_SUM_EXP=state.of_log_sum_exp,
            BLOCK=block(D, 1024),
            query_inverse_norms=inverse_norms[0],
            candidate_inverse_norms=inverse_norms[1],
            thresholds=p.thresholds,
            num_warps=4,
            enable_fp_fusion=True,
        )
