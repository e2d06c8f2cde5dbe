"""The score matrix's product with the exponential in its epilogue: no score reaches memory.

For rows i and columns j it computes E_ij = exp(s <f_i, g_j> - r_i) against a reference r_i of
the row, and the sum of each row. Within it logarithms are to base 2, as the row_shift_log2 and the
maxima that it takes and gives: a cell is one fused multiply-add and one power of 2.

Cells that others answer for are 0 in E: targets, whose exact coefficient the row kernels compute
from float32 scores, and the replaced diagonal. So are cells that a mask or equal groups exclude.

A sigmoid's E_ij is 1 / (1 + exp(-s <f_i, g_j>)), times what the row's loss counts, which is known
beforehand: no cell of a sigmoid depends on others. The sums are then those of log(1 + exp(s <f_i, g_j>)).

Both ways, a cell has a second exponential, against a reference q_j of its column. The sums of columns are
those of the second alone; what is stored is both, each times its factor.
"""

from __future__ import annotations

import triton
import triton.language as tl
from fastqt.kernels.cells import LOG2_E, NOWHERE
from fastqt.kernels.sigmoid import sigmoids, softplus_sums


@triton.jit
def scores_kernel(
    queries,  # (N, D), as the next a pointer, or a tensor descriptor if DESCRIPTORS
    candidates,  # (columns, D)
    scale,  # () float32
    bias,  # (columns,) float32, added to the scores if BIAS
    row_shift_log2,  # (N,) float32, to base 2
    factors,  # (N,) float32, of what is stored, if FACTORS
    column_shift_log2,  # (columns,) float32, to base 2, if ROW_AND_COLUMN
    column_factors,  # (columns,) float32, if ROW_AND_COLUMN and FACTORS
    exponentials,  # (rows, columns), written if STORE
    tile_row_sums,  # (blocks of columns, rows) float32: sums, or maxima of the scores to base 2, if REDUCE
    tile_column_sums,  # (blocks of rows, columns) float32: sums of what is stored, if COLUMN_SUMS
    shift_overflowed,  # (N,) int32, read if ONLY_OVERFLOWED
    any_overflowed,  # () int32
    target_starts,  # (N + 1,) int64
    target_columns,  # (targets,) int64, -1 for none
    lowest_targets,  # (N,) int32, NOWHERE without any
    highest_targets,  # (N,) int32
    query_groups,  # (N,) int32
    candidate_groups,  # (M,) int32
    mask,  # (N, M) bool
    rows,
    columns,
    width,
    first_row,  # of these rows among N
    first_column,  # of these columns among M
    query_row_stride,
    query_stride,
    candidate_row_stride,
    candidate_stride,
    exponential_row_stride,
    mask_row_stride,
    mask_stride,
    MAXIMUM: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROW_AND_COLUMN: tl.constexpr,
    BIAS: tl.constexpr,
    REDUCE: tl.constexpr,
    STORE: tl.constexpr,
    FACTORS: tl.constexpr,
    COLUMN_SUMS: tl.constexpr,
    ONLY_OVERFLOWED: tl.constexpr,
    LEAVE_OUT_DIAGONAL: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUPS: tl.constexpr,
    MASK: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    UNIT: tl.constexpr,  # of elements, in which the width and the row strides are given
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    row_tiles = tl.cdiv(rows, BLOCK_ROWS)
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    # As products with UNIT the compiler knows of what they are multiples.
    width *= UNIT
    tl.assume(width > 0)
    query_row_stride *= UNIT
    candidate_row_stride *= UNIT
    tiles = row_tiles * column_tiles
    if ONLY_OVERFLOWED:
        tiles *= tl.load(any_overflowed)
    s = tl.load(scale) * LOG2_E
    # What is kept from tile to tile would take the registers of the products.
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), disable_licm=True):
        # Tiles of a few row blocks first, so that what they load stays in the L2 cache.
        group = tile // (GROUP_ROWS * column_tiles)
        group_rows = min(row_tiles - group * GROUP_ROWS, GROUP_ROWS)
        in_group = tile % (GROUP_ROWS * column_tiles)
        row_block = group * GROUP_ROWS + in_group % group_rows
        column_block = in_group // group_rows

        first_i, first_j = row_block * BLOCK_ROWS, column_block * BLOCK_COLUMNS
        in_rows, in_columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
        row, column = first_row + first_i + in_rows, first_column + first_j + in_columns
        row_inside, column_inside = in_rows < rows - first_i, in_columns < columns - first_j
        if ONLY_OVERFLOWED:
            written = row_inside & (tl.load(shift_overflowed + row, mask=row_inside, other=0) > 0)
            needed = tl.max(written.to(tl.int32), 0) > 0
        else:
            written = row_inside
            needed = True
        if needed:
            # What the epilogue needs of each row is on its way while the products are made.
            if not (MAXIMUM or SIGMOID):
                reference = tl.load(row_shift_log2 + row, mask=row_inside, other=0.0)
            if FACTORS:
                factor = tl.load(factors + row, mask=row_inside, other=0.0)
            if TARGETS:
                lowest = tl.load(lowest_targets + row, mask=row_inside, other=NOWHERE)
                highest = tl.load(highest_targets + row, mask=row_inside, other=-1)
                first = tl.load(target_starts + row, mask=row_inside, other=0)
                count = (tl.load(target_starts + row + 1, mask=row_inside, other=0) - first).to(tl.int32)
            scores = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
            if DESCRIPTORS:  # which read zeros beyond all ends
                for start in range(0, width, BLOCK_WIDTH):
                    a = queries.load([first_row + first_i, start]).to(COMPUTE)
                    b = candidates.load([first_j, start]).to(COMPUTE)
                    scores = tl.dot(a, tl.trans(b), scores, input_precision=PRECISION)
            else:
                # Rows beyond the end are read as the last: their results are dropped. Offsets within a tile
                # fit 32 bits, which halves the registers that addresses take.
                k = tl.arange(0, BLOCK_WIDTH)
                f_rows = tl.minimum(in_rows, rows - first_i - 1)
                f = queries + tl.cast(first_row + first_i, tl.int64) * query_row_stride
                f += f_rows[:, None] * query_row_stride + k[None, :] * query_stride
                g_rows = tl.minimum(in_columns, columns - first_j - 1)
                g = candidates + tl.cast(first_j, tl.int64) * candidate_row_stride
                g += g_rows[None, :] * candidate_row_stride + k[:, None] * candidate_stride
                for start in range(0, width, BLOCK_WIDTH):
                    if EVEN_WIDTH:
                        a = tl.load(f)
                        b = tl.load(g)
                    else:
                        a = tl.load(f, mask=(start + k < width)[None, :], other=0.0)
                        b = tl.load(g, mask=(start + k < width)[:, None], other=0.0)
                    scores = tl.dot(a.to(COMPUTE), b.to(COMPUTE), scores, input_precision=PRECISION)
                    f += BLOCK_WIDTH * query_stride
                    g += BLOCK_WIDTH * candidate_stride

            if MAXIMUM or SIGMOID:
                exponent = scores * s
            elif ROW_AND_COLUMN:  # rows beyond the end count for no column
                exponent = tl.fma(scores, s, tl.where(row_inside, 0.0, float("-inf"))[:, None])
            else:
                exponent = tl.fma(scores, s, -reference[:, None])
            if BIAS:
                of_columns = tl.load(bias + first_j + in_columns, mask=column_inside, other=0.0) * LOG2_E
                exponent += of_columns[None, :]
            # Cells are left out one condition after another: to keep them all would take a register a cell.
            if not EVEN_COLUMNS:
                exponent = tl.where(column_inside[None, :], exponent, float("-inf"))
            if GROUPS:
                own = tl.load(query_groups + row, mask=row_inside, other=0)
                theirs = tl.load(candidate_groups + column, mask=column_inside, other=0)
                exponent = tl.where(own[:, None] == theirs[None, :], float("-inf"), exponent)
            if MASK:
                begin = mask + tl.cast(first_row + first_i, tl.int64) * mask_row_stride
                begin += tl.cast(first_column + first_j, tl.int64) * mask_stride
                cell = in_rows[:, None] * mask_row_stride + in_columns[None, :] * mask_stride
                inside = row_inside[:, None] & column_inside[None, :]
                masked = tl.load(begin + cell, mask=inside, other=0) != 0
                exponent = tl.where(masked, float("-inf"), exponent)
            left = first_column + first_j
            # Few tiles have any of these cells, and in others this loop takes no turn.
            begin_turns, turns = 0, 0
            if TARGETS:
                here = (lowest < left + BLOCK_COLUMNS) & (highest >= left)
                turns = tl.max(tl.where(here, count, 0), 0)
            if LEAVE_OUT_DIAGONAL:
                ahead = first_row + first_i - left
                begin_turns = tl.where((ahead < BLOCK_COLUMNS) & (ahead > -BLOCK_ROWS), -1, 0)
            for turn in tl.range(begin_turns, turns, num_stages=1):
                at = row
                if TARGETS:
                    known = (turn >= 0) & (turn < count)
                    target = tl.load(target_columns + first + turn, mask=known, other=-1).to(tl.int32)
                    at = tl.where(turn < 0, row, target)
                if tl.max(((at >= left) & (at < left + BLOCK_COLUMNS)).to(tl.int32), 0) > 0:
                    exponent = tl.where(at[:, None] == column[None, :], float("-inf"), exponent)

            if REDUCE:
                tile_row_sums_at = tile_row_sums + tl.cast(column_block, tl.int64) * rows + first_i + in_rows
            if COLUMN_SUMS:
                tile_column_sums_at = tile_column_sums + tl.cast(row_block, tl.int64) * columns
                tile_column_sums_at += first_j + in_columns
            if MAXIMUM:
                tl.store(tile_row_sums_at, tl.max(exponent, 1), mask=written)
            else:
                if ROW_AND_COLUMN:  # columns first: what is known of each takes many registers
                    at = first_j + in_columns
                    column_reference = tl.load(column_shift_log2 + at, mask=column_inside, other=0.0)
                    of_columns = tl.exp2(exponent - column_reference[None, :])
                    if COLUMN_SUMS:
                        tl.store(tile_column_sums_at, tl.sum(of_columns, 0), mask=column_inside)
                    if FACTORS:
                        column_factor = tl.load(column_factors + at, mask=column_inside, other=0.0)
                        of_columns *= column_factor[None, :]
                    exponent -= reference[:, None]
                if SIGMOID:
                    e = tl.exp2(-tl.abs(exponent))
                    if REDUCE:
                        tl.store(tile_row_sums_at, softplus_sums(exponent, e), mask=written)
                    e = sigmoids(exponent, e)
                else:
                    e = tl.exp2(exponent)
                    if REDUCE:
                        tl.store(tile_row_sums_at, tl.sum(e, 1), mask=written)
                if FACTORS:
                    e *= factor[:, None]
                if ROW_AND_COLUMN:
                    if FACTORS:
                        e += of_columns
                elif COLUMN_SUMS:  # with factors, which are 0 beyond the last row
                    tl.store(tile_column_sums_at, tl.sum(e, 0), mask=column_inside)
                if STORE:
                    begin = exponentials + tl.cast(first_i, tl.int64) * exponential_row_stride + first_j
                    cell = begin + in_rows[:, None] * exponential_row_stride + in_columns[None, :]
                    e = e.to(exponentials.dtype.element_ty)
                    inside = written[:, None]
                    if not EVEN_COLUMNS:
                        inside = inside & column_inside[None, :]
                    tl.store(cell, e, mask=inside)
