"""One launch that computes again the rows whose shift was too far off. Most often it has nothing to do.

Each program looks at the flags of its block of rows, and returns where none is set. Otherwise the programs of
that block share its tiles. E in a tile is taken against the row's maximum in the tile. The program that is
done last knows all these maxima: it finds the row's shift, and multiplies what was stored of E by the
difference. Maxima are rounded up to whole numbers to base 2, so that this multiplies by powers of 2, which
rounds nothing. The result is the same whichever program is last.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import LOG2_E, ExactCells, RowState
from fastqt.kernels.launch import (
    ROWS_AT_ONCE,
    TILES_AT_ONCE,
    cdiv,
    compute_dtype,
    multiprocessors,
    on_device,
    precision,
)
from fastqt.kernels.plan import planned
from fastqt.kernels.row_stats import conclude_rows
from fastqt.kernels.scores.epilogues import EXP, ROW_MAX, load_once, scores_log2, store_tile
from fastqt.kernels.scores.exclusions import (
    add_bias,
    exclude_exact_cells,
    exclude_groups_and_mask,
    load_row_targets,
)
from fastqt.kernels.scores.launch import elements_at_once, far
from fastqt.kernels.scores.mainloop import score_tile, strides_of_64_bits
from fastqt.kernels.scores.tile import Tile, column_tiles, row_tiles
from fastqt.kernels.tuning import REPAIR

LEAST = tl.constexpr(float("-inf"))


@triton.jit
def exponentials_of_block(
    queries,
    candidates,  # (M, D)
    strides,  # of queries and their elements, of candidates and theirs
    sizes,  # rows of the chunk, M, D
    scale_log2,
    rows,  # the chunk's first row among all; the program's first in the chunk, the offsets, which are written
    split,  # the program's number among those of its rows, and how many these are
    bias,
    row_targets,  # what load_row_targets returns, or None
    target_columns,
    groups,
    cell_mask,
    norms,  # the inverse norms of all rows and of the block's columns, or None
    of_tiles,  # (blocks of columns, rows): the maxima of E's tiles, and their sums against these
    out,  # (rows, M): E, and its row stride
    EXCLUDE_DIAGONAL: tl.constexpr,
    EVEN_D: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """E of some rows and every `splits`-th tile of a block of columns, against the rows' maxima in each."""
    N, M, D = sizes
    first_n, start_n, offs_n, written = rows
    number, splits = split
    tile_maxima, tile_row_sums = of_tiles
    mask_n = offs_n < N - start_n
    row = first_n + start_n + offs_n

    if norms[0] is not None:
        scale_log2 = (scale_log2 * tl.load(norms[0] + row, mask=mask_n, other=0.0))[:, None]

    # A value that the compiler moved out of this loop would be kept in registers during the products.
    for block_m in tl.range(number, tl.cdiv(M, BLOCK_M), splits, disable_licm=True):
        start_m = block_m * BLOCK_M
        offs_m = tl.arange(0, BLOCK_M)
        mask_m = offs_m < M - start_m

        scores = score_tile(
            queries,
            candidates,
            strides,
            (first_n + start_n, start_m),
            (offs_n, offs_m),
            (N - start_n, M - start_m),
            D,
            EVEN_D,
            False,
            COMPUTE,
            PRECISION,
            PRECISION == "tf32",
            BLOCK_N,
            BLOCK_M,
            BLOCK_D,
        )

        columns = start_m, offs_m, mask_m
        if norms[0] is not None:
            scores *= load_once(norms[1], columns)[None, :]

        x = add_bias(scores_log2(scores, scale_log2, None, mask_n, ROW_MAX), bias, start_m, offs_m, mask_m)
        x = tl.where(mask_m[None, :], x, LEAST)

        corner, indices = (first_n + start_n, start_m), (row, start_m + offs_m)
        x = exclude_groups_and_mask(x, corner, (offs_n, offs_m), indices, (mask_n, mask_m), groups, cell_mask)
        x = exclude_exact_cells(x, corner, indices, row_targets, target_columns, EXCLUDE_DIAGONAL)

        highest = tl.ceil(tl.max(x, 1))

        # The shift is subtracted before the exponential in one rounding, as in the scores kernel.
        less = scores_log2(scores, scale_log2, highest, mask_n, EXP)
        less = add_bias(less, bias, start_m, offs_m, mask_m)
        e = tl.exp2(tl.where(x == LEAST, LEAST, less))

        at = tl.cast(block_m, tl.int64) * N + start_n + offs_n
        tl.store(tile_maxima + at, highest, mask=written)
        tl.store(tile_row_sums + at, tl.sum(e, 1), mask=written)

        if out[0] is not None:
            if norms[0] is not None:
                e *= load_once(norms[1], columns)[None, :]
            store_tile(e, out, (start_n, offs_n, written), columns, False)


@triton.jit
def power_of_2(highest, shift):
    """2^(highest - shift), and 0 where all cells are excluded."""
    return tl.where(highest == LEAST, 0.0, tl.exp2(highest - shift))


@triton.jit
def combine_tiles(i, wanted, highest, of_tiles, N, blocks, BLOCK: tl.constexpr):
    """The shifts of rows i, from the largest of their exact scores and of all tiles, and their sums of E."""
    tile_maxima, tile_row_sums = of_tiles

    # Other programs have written these values: they come from L2 (.cg), as L1 may hold what was there before.
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        at = b.to(tl.int64)[None, :] * N + i[:, None]
        inside = wanted[:, None] & (b < blocks)[None, :]
        of_tile = tl.load(tile_maxima + at, mask=inside, other=LEAST, cache_modifier=".cg")
        highest = tl.maximum(highest, tl.max(of_tile, 1))

    shift = tl.ceil(highest)
    total = tl.zeros(i.shape, dtype=tl.float64)
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        at = b.to(tl.int64)[None, :] * N + i[:, None]
        inside = wanted[:, None] & (b < blocks)[None, :]
        of_tile = tl.load(tile_maxima + at, mask=inside, other=LEAST, cache_modifier=".cg")
        sums = tl.load(tile_row_sums + at, mask=inside, other=0.0, cache_modifier=".cg")
        total += tl.sum((power_of_2(of_tile, shift[:, None]) * sums).to(tl.float64), 1)
    return shift, total


@triton.jit
def rescale_block(i, wanted, shift, tile_maxima, out, sizes, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Multiplies what is stored of E in rows i so that it is against their shift."""
    matrix, stride_out_n = out
    N, M = sizes
    for start in range(0, M, BLOCK):
        j = start + tl.arange(0, BLOCK)
        inside = wanted[:, None] & (j < M)[None, :]
        of_tile = (j // BLOCK_M).to(tl.int64)[None, :] * N + i[:, None]
        highest = tl.load(tile_maxima + of_tile, mask=inside, other=LEAST, cache_modifier=".cg")
        at = matrix + i.to(tl.int64)[:, None] * stride_out_n + j[None, :]
        e = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        e *= power_of_2(highest, shift[:, None])
        tl.store(at, e.to(matrix.dtype.element_ty), mask=inside)


# Chunks differ in these, and none of them is worth code of its own.
@planned
@triton.jit(do_not_specialize=["N", "first_n", "splits"])
def repair_rows_kernel(
    queries,  # (all rows, D)
    candidates,  # (M, D)
    scale,  # () float32
    shift_overflowed,  # (all rows,) int32: 0 where there is nothing to do
    repairs_done,  # (all rows,) int32, 0 before: of a block of rows its first counts
    exact_max_log2,  # (all rows,) float32
    row_shift_log2,  # (all rows,) float32, written
    tile_maxima,  # (blocks of columns, N) float32, room for what is known of tiles, as the next
    tile_row_sums,
    target_starts,  # as row_stats_kernel takes them
    target_columns,
    target_weights,
    target_scores,
    zeroed,
    row_negative_scores,
    row_weights,
    logsumexp,
    mass,
    loss,
    factors,
    target_coefficients,
    row_negative_coefficients,
    N,  # rows of this launch
    M,  # candidates
    K,  # negatives
    D,
    first_n,  # of the rows among all rows
    splits,  # programs for each block of rows
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
    LOG_SUM_EXP: tl.constexpr,
    EVEN_D: tl.constexpr,
    FAR: tl.constexpr,  # as scores_kernel takes it
    UNIT: tl.constexpr,  # of elements, in which D, stride_qn, stride_cm and stride_km are given
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
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
    out=None,  # (N, M + K): E
):
    if FAR:
        stride_qn, stride_qd = strides_of_64_bits((stride_qn, stride_qd))
        stride_cm, stride_cd = strides_of_64_bits((stride_cm, stride_cd))
        stride_km, stride_kd = strides_of_64_bits((stride_km, stride_kd))
        stride_mask_n, stride_mask_m = strides_of_64_bits((stride_mask_n, stride_mask_m))
        stride_out_n = tl.cast(stride_out_n, tl.int64)

    start_n, number = tl.program_id(0) // splits * BLOCK_N, tl.program_id(0) % splits
    offs_n = tl.arange(0, BLOCK_N)

    row = first_n + start_n + offs_n
    flagged = tl.load(shift_overflowed + row, mask=offs_n < N - start_n, other=0) > 0

    # Most programs end here.
    if tl.max(flagged.to(tl.int32), 0) > 0:
        D *= UNIT
        tl.assume(D > 0)
        stride_qn *= UNIT

        scale_log2 = tl.load(scale) * LOG2_E
        row_targets = None
        if LISTED:
            targets = target_starts, target_columns, lowest_targets, highest_targets
            row_targets = load_row_targets(targets, row, offs_n < N - start_n)

        blocks = tl.cdiv(M, BLOCK_M)
        rows, split = (first_n, start_n, offs_n, flagged), (number, splits)
        exponentials_of_block(
            queries,
            candidates,
            (stride_qn, stride_qd, stride_cm * UNIT, stride_cd),
            (N, M, D),
            scale_log2,
            rows,
            split,
            bias,
            row_targets,
            target_columns if LISTED else None,
            (query_groups, candidate_groups),
            (mask, stride_mask_n, stride_mask_m),
            (query_inverse_norms, candidate_inverse_norms),
            (tile_maxima, tile_row_sums),
            (out, stride_out_n),
            EXCLUDE_DIAGONAL,
            EVEN_D,
            COMPUTE,
            PRECISION,
            BLOCK_N,
            BLOCK_M,
            BLOCK_D,
        )

        of_negatives = tl.cast(blocks, tl.int64) * N
        if negatives is not None:
            exponentials_of_block(
                queries,
                negatives,
                (stride_qn, stride_qd, stride_km * UNIT, stride_kd),
                (N, K, D),
                scale_log2,
                rows,
                split,
                None,
                None,
                None,
                (None, None),
                (None, 0, 0),
                (query_inverse_norms, negative_inverse_norms),
                (tile_maxima + of_negatives, tile_row_sums + of_negatives),
                (out + M if out is not None else None, stride_out_n),
                False,
                EVEN_D,
                COMPUTE,
                PRECISION,
                BLOCK_N,
                BLOCK_M,
                BLOCK_D,
            )
            blocks += tl.cdiv(K, BLOCK_M)

        # What all threads have stored is seen by the program that counts the last part.
        tl.debug_barrier()
        if tl.atomic_add(repairs_done + first_n + start_n, 1) == splits - 1:
            exact = target_starts, target_columns, target_weights, target_scores, zeroed, row_negative_scores
            outputs = logsumexp, mass, loss, factors, target_coefficients, row_negative_coefficients

            for start in tl.range(start_n, min(start_n + BLOCK_N, N), BLOCK_ROWS, num_stages=1):
                i = start + tl.arange(0, BLOCK_ROWS)
                wanted = (i < N) & (tl.load(shift_overflowed + first_n + i, mask=i < N, other=0) > 0)

                if tl.max(wanted.to(tl.int32), 0) > 0:
                    highest = tl.load(exact_max_log2 + first_n + i, mask=wanted, other=0.0)
                    of_tiles = tile_maxima, tile_row_sums
                    shift, others = combine_tiles(i, wanted, highest, of_tiles, N, blocks, BLOCK)
                    tl.store(row_shift_log2 + first_n + i, shift, mask=wanted)

                    conclude_rows(
                        first_n + i,
                        wanted,
                        shift,
                        others,
                        exact,
                        row_weights,
                        outputs,
                        ZEROED,
                        ROW_NEGATIVE,
                        LOG_SUM_EXP,
                    )

                    if out is not None:
                        stored = out, stride_out_n
                        rescale_block(i, wanted, shift, tile_maxima, stored, (N, M), BLOCK_M, BLOCK_COLUMNS)
                        if negatives is not None:
                            stored = out + M, stride_out_n
                            maxima = tile_maxima + of_negatives
                            rescale_block(i, wanted, shift, maxima, stored, (N, K), BLOCK_M, BLOCK_COLUMNS)


def repair_rows(
    tiles: Sequence[Tile],
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    cells: ExactCells,
    state: RowState,
    exponentials: Tensor | None = None,  # (rows, columns of all tiles), rows contiguous
) -> None:
    """Computes those rows again whose shift was too far off, against their largest score, rounded up.

    `tiles` are the same rows against the candidates and, if there are any, against the negatives. What
    `exp_scores` and `row_stats` have written of such a row is written anew.
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
        repair_rows_kernel[(blocks_n * splits,)](
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
            tile.first_row,
            splits,
            queries.stride(0) // unit,
            queries.stride(1),
            *first,
            *(second[0] if second else (0, 0)),
            0 if exponentials is None else exponentials.stride(0),
            *((0, 0) if tile.mask is None else tile.mask.stride()),
            EXCLUDE_DIAGONAL=tile.exclude_diagonal,
            LISTED=tile.target_starts is not None,
            ZEROED=cells.zeroed is not None,
            ROW_NEGATIVE=cells.row_negative_kind,
            LOG_SUM_EXP=state.of_log_sum_exp,
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
            BLOCK_ROWS=ROWS_AT_ONCE,
            BLOCK=TILES_AT_ONCE,
            BLOCK_COLUMNS=512,
            negatives=negatives,
            bias=tile.bias,
            lowest_targets=tile.lowest_targets,
            highest_targets=tile.highest_targets,
            query_groups=tile.query_groups,
            candidate_groups=tile.candidate_groups,
            mask=tile.mask,
            query_inverse_norms=tile.query_inverse_norms,
            candidate_inverse_norms=tile.candidate_inverse_norms,
            negative_inverse_norms=others[0].candidate_inverse_norms if others else None,
            out=exponentials,
            num_warps=REPAIR.warps,
            enable_fp_fusion=True,
            num_stages=REPAIR.stages,
        )
