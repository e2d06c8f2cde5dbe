"""The kernel of the scores: tiles of the product queries @ candidates.T, each with an epilogue.

No score reaches memory. The epilogue of a tile is one of

- ROW_MAX: the largest score of each row, to base 2.
- EXP: E_ij = exp(s <f_i, g_j> - r_i) with a shift r_i of the row, and the sum of each row.
- SIGMOID: E_ij = 1 / (1 + exp(-s <f_i, g_j>)), and the sum of log(1 + exp(s <f_i, g_j>)) over each row. No
  cell of a sigmoid depends on others, so the factor of its row is known before.
- EXP_ROWS_AND_COLUMNS: exp(s <f_i, g_j> - r_i) and exp(s <f_i, g_j> - q_j), with a shift q_j of the column,
  the sums of the first over each row and those of the second over each column.

With inverse norms a_i and b_j of queries and candidates, <f_i, g_j> is multiplied by both. `epilogues` says
what E that is stored is then multiplied by.

An operand that is None is not read or not written: its code is left out when the kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastqt.kernels.addresses import strides_of_64_bits
from fastqt.kernels.cells import LOG2_E
from fastqt.kernels.plan import planned
from fastqt.kernels.scores.epilogues import (
    EXP,
    EXP_ROWS_AND_COLUMNS,
    ROW_MAX,
    SIGMOID,
    exp_epilogue,
    exp_rows_and_columns_epilogue,
    load_once,
    row_max_epilogue,
    scores_log2,
    sigmoid_epilogue,
)
from fastqt.kernels.scores.exclusions import (
    add_bias,
    exclude_exact_cells,
    exclude_groups_and_mask,
    exclude_similar,
    load_row_targets,
    load_thresholds,
)
from fastqt.kernels.tf32 import rounded_to_tf32


@triton.jit
def grouped_blocks(tile, blocks_n, blocks_m, GROUP_N: tl.constexpr):
    """The blocks of rows and of columns of a tile: all tiles of a few blocks of rows come before the next
    blocks of rows, so that what they load stays in the L2 cache."""
    group = tile // (GROUP_N * blocks_m)
    group_n = min(blocks_n - group * GROUP_N, GROUP_N)
    in_group = tile % (GROUP_N * blocks_m)
    return group * GROUP_N + in_group % group_n, in_group // group_n


@triton.jit
def score_tile(
    queries,
    candidates,
    strides,  # of queries and their elements, of candidates and theirs
    start,  # the tile's first query among all, its first candidate
    offsets,  # offs_n and offs_m from there
    sizes,  # how many queries and candidates there are from there on
    D,
    EVEN_D: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Inner products of BLOCK_N queries and BLOCK_M candidates, float32."""
    first_query, first_candidate = start
    scores = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)

    if DESCRIPTORS:  # They read zeros beyond all ends.
        for d in range(0, D, BLOCK_D):
            a = queries.load([first_query, d]).to(COMPUTE)
            b = candidates.load([first_candidate, d]).to(COMPUTE)
            if ROUND:
                a, b = rounded_to_tf32(a), rounded_to_tf32(b)
            scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
    else:
        stride_qn, stride_qd, stride_cm, stride_cd = strides
        offs_n, offs_m = offsets
        left_n, left_m = sizes

        # Rows beyond the end are read as the last one, and their results are dropped. Unless strides have 64
        # bits, offsets within a tile have 32, which halves the registers that addresses take.
        offs_d = tl.arange(0, BLOCK_D)
        offs_qn = tl.minimum(offs_n, left_n - 1)
        f = queries + tl.cast(first_query, tl.int64) * stride_qn
        f += offs_qn[:, None] * stride_qn + offs_d[None, :] * stride_qd

        offs_cm = tl.minimum(offs_m, left_m - 1)
        g = candidates + tl.cast(first_candidate, tl.int64) * stride_cm
        g += offs_cm[None, :] * stride_cm + offs_d[:, None] * stride_cd

        for d in range(0, D, BLOCK_D):
            if EVEN_D:
                a = tl.load(f)
                b = tl.load(g)
            else:
                a = tl.load(f, mask=(d + offs_d < D)[None, :], other=0.0)
                b = tl.load(g, mask=(d + offs_d < D)[:, None], other=0.0)

            a, b = a.to(COMPUTE), b.to(COMPUTE)
            if ROUND:
                a, b = rounded_to_tf32(a), rounded_to_tf32(b)
            scores = tl.dot(a, b, scores, input_precision=PRECISION)
            f += BLOCK_D * stride_qd
            g += BLOCK_D * stride_cd
    return scores


@planned
@triton.jit
def scores_kernel(
    queries,  # (all rows, D): a pointer, or a tensor descriptor if DESCRIPTORS, as the next
    candidates,  # (M, D)
    scale,  # () float32
    N,  # rows of this launch, a part of all rows
    M,  # columns of this launch, a part of all columns
    D,
    first_n,  # of the rows among all rows
    first_m,  # of the columns among all columns
    stride_qn,
    stride_qd,
    stride_cm,
    stride_cd,
    stride_out_n,
    stride_mask_n,
    stride_mask_m,
    EPILOGUE: tl.constexpr,
    EXCLUDE_DIAGONAL: tl.constexpr,
    EVEN_M: tl.constexpr,  # BLOCK_M divides M
    EVEN_D: tl.constexpr,  # BLOCK_D divides D
    DESCRIPTORS: tl.constexpr,
    FAR: tl.constexpr,  # an offset within a tile does not fit 32 bits
    UNIT: tl.constexpr,  # of elements, in which D, stride_qn and stride_cm are given
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    ROUND: tl.constexpr,  # the operands to TF32, which is done to copies where these are read
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_N: tl.constexpr,
    bias=None,  # (M,) float32, added to the scores
    row_shift_log2=None,  # (all rows,) float32, of both EXP epilogues
    row_factors=None,  # (all rows,) float32, of what is stored
    column_shift_log2=None,  # (M,) float32, of EXP_ROWS_AND_COLUMNS
    column_factors=None,  # (M,) float32, likewise, of what is stored
    out=None,  # (N, M): E
    tile_row_sums=None,  # (blocks of columns, N) float32: sums, or the maxima of ROW_MAX
    tile_column_sums=None,  # (blocks of rows, M) float32
    target_starts=None,  # (all rows + 1,) int64, given with the three following
    target_columns=None,  # (targets,) int64, -1 for none
    lowest_targets=None,  # (all rows,) int32, NOWHERE without any
    highest_targets=None,  # (all rows,) int32
    query_groups=None,  # (all rows,) int32
    candidate_groups=None,  # (all columns,) int32
    mask=None,  # (all rows, all columns) bool
    query_inverse_norms=None,  # (all rows,) float32, given with the following: scores are cosines
    candidate_inverse_norms=None,  # (M,) float32
    thresholds=None,  # (all rows,) float32, of scores that are neither scaled nor biased
):
    blocks_n = tl.cdiv(N, BLOCK_N)
    blocks_m = tl.cdiv(M, BLOCK_M)

    if FAR:
        stride_qn, stride_qd = strides_of_64_bits((stride_qn, stride_qd))
        stride_cm, stride_cd = strides_of_64_bits((stride_cm, stride_cd))
        stride_mask_n, stride_mask_m = strides_of_64_bits((stride_mask_n, stride_mask_m))
        stride_out_n = tl.cast(stride_out_n, tl.int64)

    # As products with UNIT the compiler knows what they are multiples of.
    D *= UNIT
    tl.assume(D > 0)
    stride_qn *= UNIT
    stride_cm *= UNIT

    tiles = blocks_n * blocks_m
    scale_log2 = tl.load(scale) * LOG2_E

    # Values that the compiler moved out of this loop would take the registers of the products.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), disable_licm=True):
        block_n, block_m = grouped_blocks(tile, blocks_n, blocks_m, GROUP_N)
        start_n, start_m = block_n * BLOCK_N, block_m * BLOCK_M
        offs_n, offs_m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
        mask_n, mask_m = offs_n < N - start_n, offs_m < M - start_m
        row, column = first_n + start_n + offs_n, first_m + start_m + offs_m

        # What the epilogue needs of each row is loaded first: it arrives while the products are made.
        row_shift, row_factor, row_norm, row_targets = None, None, None, None
        if row_shift_log2 is not None:
            # Beyond the end E is to be 0: the last row, which is read there, may need its shift.
            row_shift = tl.load(row_shift_log2 + row, mask=mask_n, other=float("inf"))
        if row_factors is not None:
            row_factor = tl.load(row_factors + row, mask=mask_n, other=0.0)
        if query_inverse_norms is not None:
            row_norm = tl.load(query_inverse_norms + row, mask=mask_n, other=0.0)
        row_thresholds = load_thresholds(thresholds, row, mask_n, row_norm)
        if target_starts is not None:
            targets = target_starts, target_columns, lowest_targets, highest_targets
            row_targets = load_row_targets(targets, row, mask_n)

        offsets = offs_n, offs_m
        scores = score_tile(
            queries,
            candidates,
            (stride_qn, stride_qd, stride_cm, stride_cd),
            (first_n + start_n, start_m),
            offsets,
            (N - start_n, M - start_m),
            D,
            EVEN_D,
            DESCRIPTORS,
            COMPUTE,
            PRECISION,
            ROUND,
            BLOCK_N,
            BLOCK_M,
            BLOCK_D,
        )

        tile_scale = scale_log2
        if row_norm is not None:
            scores *= load_once(candidate_inverse_norms, (start_m, offs_m, mask_m))[None, :]
            tile_scale = (scale_log2 * row_norm)[:, None]
        x = scores_log2(scores, tile_scale, row_shift, mask_n, EPILOGUE)
        x = add_bias(x, bias, start_m, offs_m, mask_m)
        x = exclude_similar(x, scores, row_thresholds)
        # Rows without targets, and rows beyond the end: an infinite bias must not make NaN of their 0.
        if bias is not None and EPILOGUE == EXP:
            x = tl.where(row_shift[:, None] == float("inf"), float("-inf"), x)
        elif tile_column_sums is not None and EPILOGUE == SIGMOID:
            x = tl.where(mask_n[:, None], x, float("-inf"))
        if not EVEN_M:
            x = tl.where(mask_m[None, :], x, float("-inf"))

        corner, indices = (first_n + start_n, first_m + start_m), (row, column)
        groups, cell_mask = (query_groups, candidate_groups), (mask, stride_mask_n, stride_mask_m)
        x = exclude_groups_and_mask(x, corner, offsets, indices, (mask_n, mask_m), groups, cell_mask)
        x = exclude_exact_cells(x, corner, indices, row_targets, target_columns, EXCLUDE_DIAGONAL)

        # The epilogue takes addresses: if it formed them, a sigmoid's would take up to 7 more registers.
        row_sums_at, column_sums_at = None, None
        if tile_row_sums is not None:
            row_sums_at = tile_row_sums + tl.cast(block_m, tl.int64) * N + start_n + offs_n
        if tile_column_sums is not None:
            column_sums_at = tile_column_sums + tl.cast(block_n, tl.int64) * M + (start_m + offs_m)
        sums, stored = (row_sums_at, column_sums_at), (out, stride_out_n)
        norms = row_norm, candidate_inverse_norms
        rows, columns = (start_n, offs_n, mask_n), (start_m, offs_m, mask_m)

        if EPILOGUE == ROW_MAX:
            row_max_epilogue(x, sums, rows, columns)
        elif EPILOGUE == EXP:
            exp_epilogue(x, row_factor, norms, sums, stored, rows, columns, EVEN_M)
        elif EPILOGUE == SIGMOID:
            sigmoid_epilogue(x, row_factor, norms, sums, stored, rows, columns, EVEN_M)
        else:
            tl.static_assert(EPILOGUE == EXP_ROWS_AND_COLUMNS)
            exp_rows_and_columns_epilogue(
                x,
                row_shift,
                row_factor,
                column_shift_log2,
                column_factors,
                norms,
                sums,
                stored,
                rows,
                columns,
                EVEN_M,
            )
