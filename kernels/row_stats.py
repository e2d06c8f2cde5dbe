"""Row statistics of a softmax: from sums of exponentials to losses, and to dL/dS at the exact cells.

One launch sums up, computes again the rows whose shift was too far off, and concludes. Each program of a
block of rows adds up the sums of its tiles. Where all of the block's shifts will do, which is so nearly
always, the first of its programs concludes the rows, and the others are done. Otherwise all share what has to
be computed again, and the one that is done last concludes them (`repair.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.addresses import elements_at_once, far, strides_of_64_bits
from fastqt.kernels.cells import LOG2_E, ExactCells, RowState
from fastqt.kernels.launch import TILES_AT_ONCE, cdiv, compute_dtype, multiprocessors, on_device, precision
from fastqt.kernels.plan import planned
from fastqt.kernels.repair import combine_tiles, exponentials_of_block, rescale_block
from fastqt.kernels.row_sums import conclude_rows, sum_tiles
from fastqt.kernels.scores.exclusions import load_row_targets
from fastqt.kernels.scores.tile import Tile, column_tiles, row_tiles
from fastqt.kernels.tuning import REPAIR

# A row sum between exp(-40) and exp(80), and its terms that matter, are in the range of float32 and bfloat16.
LEAST, MOST = tl.constexpr(4.2e-18), tl.constexpr(5.5e34)
# The same where E is stored times inverse norms, of which none is larger than 1e12.
MOST_OF_COSINES = tl.constexpr(1e24)


@triton.jit
def shifts_will_do(others, exact_max_log2, shift_log2, COSINES: tl.constexpr):
    """Whether neither the sums of rows nor E, as it is stored, can have overflowed or underflowed.

    The largest exact cell stands for all of them: none is above the shift. Rows without targets have a shift
    of +inf, with which all of E is 0.
    """
    most = MOST_OF_COSINES if COSINES else MOST
    total = others + tl.exp2(exact_max_log2 - shift_log2).to(tl.float64)
    without_targets = (shift_log2 == float("inf")) & (others == 0)
    return ((total > LEAST) & (total < most)) | without_targets


# Chunks differ in these, and none of them is worth code of its own.
@planned
@triton.jit(do_not_specialize=["N", "tiles", "first_n", "splits", "stride_tiles"])
def row_stats_kernel(
    tile_row_sums,  # (tiles, N) float32: sums of E
    queries,  # (all rows, D)
    candidates,  # (M, D)
    scale,  # () float32
    shift_overflowed,  # (all rows,) int32, written
    repairs_done,  # (all rows,) int32, 0 before and after: of a block of rows its first counts
    exact_max_log2,  # (all rows,) float32
    row_shift_log2,  # (all rows,) float32, written where it was too far off
    repaired_maxima,  # (blocks of columns, N) float32, room for what is known of tiles, as the next
    repaired_row_sums,
    target_starts,
    target_columns,
    target_weights,  # (targets,) float64
    target_scores,
    zeroed,  # (all rows,) bool
    row_negative_scores,
    row_weights,  # (all rows,) float64
    logsumexp,  # (all rows,) float64
    mass,
    loss,
    factors,  # (all rows,) float64: w rho / sum of all exponentials
    target_coefficients,  # (targets,) float32
    row_negative_coefficients,  # (all rows,) float32
    N,  # rows of this launch
    M,  # candidates
    K,  # negatives
    D,
    tiles,  # of a row, whose sums are known
    first_n,  # of the rows among all rows
    splits,  # programs for each block of rows
    stride_tiles,
    stride_qn,
    stride_qd,
    stride_cm,
    stride_cd,
    stride_km,
    stride_kd,
    stride_out_n,
    stride_mask_n,
    stride_mask_m,
    EXCLUDE_DIAGONAL: tl.constexpr,
    LISTED: tl.constexpr,  # exact cells are those that are listed, not the diagonal's
    ZEROED: tl.constexpr,
    ROW_NEGATIVE: tl.constexpr,
    LOG_SUM_EXP: tl.constexpr,  # rows have mass 1 and no targets
    COSINES: tl.constexpr,
    EVEN_D: tl.constexpr,
    FAR: tl.constexpr,  # as scores_kernel takes it
    UNIT: tl.constexpr,  # of elements, in which D, stride_qn, stride_cm and stride_km are given
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    negatives=None,  # (K, D)
    bias=None,  # (M,) float32
    lowest_targets=None,  # (all rows,) int32, given if LISTED, as the next
    highest_targets=None,
    query_groups=None,  # (all rows,) int32
    candidate_groups=None,  # (M,) int32
    mask=None,  # (all rows, M) bool
    query_inverse_norms=None,  # (all rows,) float32, given with the two following: scores are cosines
    candidate_inverse_norms=None,  # (M,) float32
    negative_inverse_norms=None,  # (K,) float32
    thresholds=None,  # (all rows,) float32, as scores_kernel takes them
    out=None,  # (N, M + K): E
):
    """Losses of a block of rows and dL/dS at their exact cells, with other shifts where theirs overflowed."""
    if FAR:
        stride_qn, stride_qd = strides_of_64_bits((stride_qn, stride_qd))
        stride_cm, stride_cd = strides_of_64_bits((stride_cm, stride_cd))
        stride_km, stride_kd = strides_of_64_bits((stride_km, stride_kd))
        stride_mask_n, stride_mask_m = strides_of_64_bits((stride_mask_n, stride_mask_m))
        stride_out_n = tl.cast(stride_out_n, tl.int64)

    start_n, number = tl.program_id(0) // splits * BLOCK_N, tl.program_id(0) % splits
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N - start_n
    row = first_n + start_n + offs_n

    others = sum_tiles(tile_row_sums, start_n + offs_n, mask_n, stride_tiles, tiles, BLOCK)
    shift = tl.load(row_shift_log2 + row, mask=mask_n, other=0.0)
    highest = tl.load(exact_max_log2 + row, mask=mask_n, other=0.0)

    flagged = mask_n & (shifts_will_do(others, highest, shift, COSINES) == 0)
    repairs = tl.max(flagged.to(tl.int32), 0) > 0

    # E has the columns of the candidates and then of the negatives: how many these are, and how many
    # columns and blocks of columns are before them.
    PARTS: tl.constexpr = 1 if negatives is None else 2
    matrices, columns = (candidates, negatives), (M, K)
    columns_before, blocks_before = (0, M), (0, tl.cdiv(M, BLOCK_M))

    concludes = number == 0
    if repairs:
        # Under other names: integers that are 1 are constants, which no branch may give another type.
        width, query_stride = D * UNIT, stride_qn * UNIT
        tl.assume(width > 0)

        scale_log2 = tl.load(scale) * LOG2_E
        row_targets = None
        if LISTED:
            targets = target_starts, target_columns, lowest_targets, highest_targets
            row_targets = load_row_targets(targets, row, mask_n)

        rows, split = (first_n, start_n, offs_n, flagged), (number, splits)
        strides = (stride_cm * UNIT, stride_cd), (stride_km * UNIT, stride_kd)
        inverse_norms = candidate_inverse_norms, negative_inverse_norms

        # To the scores of negatives nothing is added, and thresholds alone exclude cells of them.
        for part in tl.static_range(PARTS):
            first = tl.cast(blocks_before[part], tl.int64) * N
            exponentials_of_block(
                queries,
                matrices[part],
                (query_stride, stride_qd, strides[part][0], strides[part][1]),
                (N, columns[part], width),
                scale_log2,
                rows,
                split,
                bias if part == 0 else None,
                row_targets if part == 0 else None,
                target_columns if LISTED and part == 0 else None,
                (query_groups, candidate_groups) if part == 0 else (None, None),
                (mask, stride_mask_n, stride_mask_m) if part == 0 else (None, 0, 0),
                (query_inverse_norms, inverse_norms[part]),
                thresholds,
                (repaired_maxima + first, repaired_row_sums + first),
                (out + columns_before[part] if out is not None else None, stride_out_n),
                EXCLUDE_DIAGONAL and part == 0,
                EVEN_D,
                COMPUTE,
                PRECISION,
                BLOCK_N,
                BLOCK_M,
                BLOCK_D,
            )

        # What all threads have stored is seen by the program that counts the last part.
        tl.debug_barrier()
        concludes = tl.atomic_add(repairs_done + first_n + start_n, 1) == splits - 1

    # No program of the block reads the shifts once the last one has counted.
    if concludes:
        if repairs:
            i, of_tiles = start_n + offs_n, (repaired_maxima, repaired_row_sums)
            blocks = blocks_before[PARTS - 1] + tl.cdiv(columns[PARTS - 1], BLOCK_M)
            new_shift, new_others = combine_tiles(i, flagged, highest, of_tiles, N, blocks, BLOCK)
            shift, others = tl.where(flagged, new_shift, shift), tl.where(flagged, new_others, others)
            tl.store(row_shift_log2 + row, shift, mask=flagged)
            tl.store(repairs_done + first_n + start_n, 0)

            if out is not None:
                for part in tl.static_range(PARTS):
                    maxima = repaired_maxima + tl.cast(blocks_before[part], tl.int64) * N
                    stored, sizes = (out + columns_before[part], stride_out_n), (N, columns[part])
                    rescale_block(i, flagged, shift, maxima, stored, sizes, BLOCK_M, BLOCK)

        exact = target_starts, target_columns, target_weights, target_scores, zeroed, row_negative_scores
        outputs = logsumexp, mass, loss, factors, target_coefficients, row_negative_coefficients
        conclude_rows(
            row, mask_n, shift, others, exact, row_weights, outputs, ZEROED, ROW_NEGATIVE, LOG_SUM_EXP
        )
        tl.store(shift_overflowed + row, flagged.to(tl.int32), mask=mask_n)


def row_stats(
    tile_row_sums: Tensor,  # (tiles, rows) float32, rows contiguous: sums of E by tiles of columns
    tiles: Sequence[Tile],
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    cells: ExactCells,
    state: RowState,
    exponentials: Tensor | None = None,  # (rows, columns of all tiles), rows contiguous
) -> None:
    """Finds losses, statistics and coefficients of exact cells of some rows, once the sums of E are known.

    `tiles` are the rows against the candidates and, if there are any, against the negatives. Rows whose shift
    was too far off are flagged. They are computed again, against their largest score, rounded up: their
    shift and what is stored of them in E are written anew.
    """
    tile, *others = tiles
    negatives = others[0].candidates if others else None
    matrices = [each.candidates for each in tiles]

    unit = elements_at_once(queries, *matrices)
    step = REPAIR.width if unit > 1 else 16

    D = queries.shape[1]
    blocks = sum(column_tiles(matrix.shape[0], REPAIR) for matrix in matrices)
    blocks_n = row_tiles(tile.rows, REPAIR)
    splits = min(max(multiprocessors(queries) // blocks_n, 1), blocks)

    # Both begin at multiples of 16 bytes, so that nothing is compiled for one that does not.
    of_tiles = queries.new_empty(2, 4 * cdiv(blocks * tile.rows, 4), dtype=scale.dtype)
    first, *second = ((matrix.stride(0) // unit, matrix.stride(1)) for matrix in matrices)

    with on_device(queries):
        row_stats_kernel[(blocks_n * splits,)](
            tile_row_sums,
            queries,
            tile.candidates,
            scale,
            state.shift_overflowed,
            state.repairs_done,
            state.exact_max_log2,
            state.row_shift_log2,
            *of_tiles.unbind(),
            *cells.of_rows,
            state.weights,
            *state.statistics,
            *cells.all_coefficients,
            tile.rows,
            tile.candidates.shape[0],
            0 if negatives is None else negatives.shape[0],
            D // unit,
            tile_row_sums.shape[0],
            tile.first_row,
            splits,
            tile_row_sums.stride(0),
            queries.stride(0) // unit,
            queries.stride(1),
            *first,
            *(second[0] if second else (0, 0)),
            0 if exponentials is None else exponentials.stride(0),
            *tile.mask_strides,
            EXCLUDE_DIAGONAL=tile.exclude_diagonal,
            LISTED=tile.target_starts is not None,
            ZEROED=cells.zeroed is not None,
            ROW_NEGATIVE=cells.row_negative_kind,
            LOG_SUM_EXP=state.of_log_sum_exp,
            COSINES=state.of_cosines,
            EVEN_D=D % step == 0,
            FAR=far(
                (queries, REPAIR.rows, step),
                *((matrix, REPAIR.columns, step) for matrix in matrices),
                (exponentials, REPAIR.rows, REPAIR.columns),
                (tile.mask, REPAIR.rows, REPAIR.columns),
            ),
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=precision(queries.dtype),
            BLOCK_N=REPAIR.rows,
            BLOCK_M=REPAIR.columns,
            BLOCK_D=step,
            BLOCK=TILES_AT_ONCE,
            negatives=negatives,
            negative_inverse_norms=others[0].candidate_inverse_norms if others else None,
            **tile.operands,
            out=exponentials,
            num_warps=REPAIR.warps,
            enable_fp_fusion=True,
            num_stages=REPAIR.stages,
        )
