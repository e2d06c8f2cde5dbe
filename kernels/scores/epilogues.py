"""What becomes of a tile of scores while it is in registers: a reduction, a store, or both.

A tile's scores come to base 2, so that a cell costs one fused multiply-add and one power of 2. The epilogues
have these arguments in common, and a None among them is left out:

    x: (BLOCK_N, BLOCK_M) float32, what `scores_log2` returned, with biases and exclusions.
    row_factor: (BLOCK_N,) float32, what the row of E is multiplied by before it is stored.
    sums: where the sum of each row goes, (BLOCK_N,) pointers, and that of each column, (BLOCK_M,) pointers.
    out: the matrix that E is stored in, and its row stride.
    norms: the inverse norms of the tile's rows, (BLOCK_N,), and of all columns, (M,). They do not enter the
        sums. A column of what is stored is multiplied by the second, and if there is a row_factor, a row by
        the first.
    rows, columns: the tile's first row (column), the offsets from it, and which of these are written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastqt.kernels.sigmoid import sigmoids, softplus_sums

# The choices of EPILOGUE.
ROW_MAX = tl.constexpr("ROW_MAX")
EXP = tl.constexpr("EXP")
SIGMOID = tl.constexpr("SIGMOID")
EXP_ROWS_AND_COLUMNS = tl.constexpr("EXP_ROWS_AND_COLUMNS")


@triton.jit
def scores_log2(
    scores,  # (BLOCK_N, BLOCK_M) float32, inner products
    scale_log2,  # the scale times log2(e), or with inverse norms (BLOCK_N, 1): also times those of rows
    row_shift,  # (BLOCK_N,), of EXP alone
    mask_n,
    EPILOGUE: tl.constexpr,
):
    """Scores to base 2, less what the epilogue wants to have subtracted before biases and exclusions."""
    if EPILOGUE == EXP:
        return tl.fma(scores, scale_log2, -row_shift[:, None])
    if EPILOGUE == EXP_ROWS_AND_COLUMNS:  # Rows beyond the end must not count in the sums of columns.
        return tl.fma(scores, scale_log2, tl.where(mask_n, 0.0, float("-inf"))[:, None])
    return scores * scale_log2


@triton.jit
def store_tile(
    e,  # (BLOCK_N, BLOCK_M) float32
    out,  # (N, M), and its row stride
    rows,
    columns,
    EVEN_M: tl.constexpr,
):
    matrix, stride_out_n = out
    start_n, offs_n, mask_n = rows
    start_m, offs_m, mask_m = columns

    # Offsets within a tile have as many bits as the stride. 32 bits halve the registers that addresses take.
    start = matrix + tl.cast(start_n, tl.int64) * stride_out_n + start_m
    cell = start + offs_n[:, None] * stride_out_n + offs_m[None, :]

    inside = mask_n[:, None]
    if not EVEN_M:
        inside = inside & mask_m[None, :]
    tl.store(cell, e.to(matrix.dtype.element_ty), mask=inside)


@triton.jit
def load_columns(of_columns, columns):
    """Values (BLOCK_M,) of a tile's columns."""
    start_m, offs_m, mask_m = columns
    return tl.load(of_columns + (start_m + offs_m), mask=mask_m, other=0.0)


@triton.jit
def load_once(of_columns, columns):
    """The same for one use. They take a register each until then, so that they are to be loaded here and not
    before, nor kept for their next use: a volatile load stays where it is."""
    start_m, offs_m, mask_m = columns
    return tl.load(of_columns + (start_m + offs_m), mask=mask_m, other=0.0, volatile=True)


@triton.jit
def row_max_epilogue(x, sums, rows, columns):
    """The maximum of each row."""
    row_sums_at, _ = sums
    tl.store(row_sums_at, tl.max(x, 1), mask=rows[2])


@triton.jit
def exp_epilogue(x, row_factor, norms, sums, out, rows, columns, EVEN_M: tl.constexpr):
    """E = 2^x: the sum of each row, then E times the row's factor."""
    row_sums_at, _ = sums
    e = tl.exp2(x)
    if row_sums_at is not None:
        tl.store(row_sums_at, tl.sum(e, 1), mask=rows[2])
    weighted_epilogue(e, row_factor, norms, sums, out, rows, columns, EVEN_M)


@triton.jit
def sigmoid_epilogue(x, row_factor, norms, sums, out, rows, columns, EVEN_M: tl.constexpr):
    """E = 1 / (1 + 2^-x): the sum of each row's log(1 + 2^x), then E times the row's factor."""
    row_sums_at, _ = sums
    e = tl.exp2(-tl.abs(x))
    if row_sums_at is not None:
        tl.store(row_sums_at, softplus_sums(x, e), mask=rows[2])
    weighted_epilogue(sigmoids(x, e), row_factor, norms, sums, out, rows, columns, EVEN_M)


@triton.jit
def weighted_epilogue(e, row_factor, norms, sums, out, rows, columns, EVEN_M: tl.constexpr):
    """E times the row's factor, if there is one: the sum of each column, and the tile itself."""
    _, column_sums_at = sums
    if row_factor is not None:
        e *= row_factor[:, None]
    if column_sums_at is not None:  # Rows beyond the last have a factor of 0.
        tl.store(column_sums_at, tl.sum(e, 0), mask=columns[2])
    if out[0] is not None:
        if norms[0] is not None:
            if row_factor is not None:
                e *= norms[0][:, None]
            e *= load_once(norms[1], columns)[None, :]
        store_tile(e, out, rows, columns, EVEN_M)


@triton.jit
def both_exponentials(
    x,  # of the row's softmax
    x_of_columns,
    row_shift,  # (BLOCK_N,)
    row_factor,  # (BLOCK_N,), or None
    column_shift_log2,  # (M,)
    column_factors,  # (M,), given if row_factor is
    sums,
    rows,
    columns,
):
    """Each cell's exponential with the shift of its row and with that of its column, added up by factors.

    The sums of rows are those of the first, the sums of columns those of the second. Without factors what is
    returned is the first.
    """
    row_sums_at, column_sums_at = sums

    # Columns come first, because the values that each thread holds of them take many registers.
    column_shift = load_columns(column_shift_log2, columns)
    of_columns = tl.exp2(x_of_columns - column_shift[None, :])
    if column_sums_at is not None:
        tl.store(column_sums_at, tl.sum(of_columns, 0), mask=columns[2])
    if column_factors is not None:
        of_columns *= load_columns(column_factors, columns)[None, :]

    x -= row_shift[:, None]
    e = tl.exp2(x)
    if row_sums_at is not None:
        tl.store(row_sums_at, tl.sum(e, 1), mask=rows[2])

    if row_factor is not None:
        e *= row_factor[:, None]
        e += of_columns
    return e


@triton.jit
def store_weighted(e, norms, out, rows, columns, EVEN_M: tl.constexpr):
    """Stores cells that hold all weights but the inverse norms."""
    if norms[0] is not None:
        e *= norms[0][:, None]
        e *= load_once(norms[1], columns)[None, :]
    store_tile(e, out, rows, columns, EVEN_M)


@triton.jit
def exp_rows_and_columns_epilogue(
    x,
    row_shift,  # (BLOCK_N,)
    row_factor,  # (BLOCK_N,), or None
    column_shift_log2,  # (M,)
    column_factors,  # (M,), given if row_factor is
    norms,
    sums,
    out,
    rows,
    columns,
    EVEN_M: tl.constexpr,
):
    """Both exponentials of each cell, of which with factors the sum is stored, and without them the score."""
    if row_factor is None and out[0] is not None:
        store_tile(x, out, rows, columns, EVEN_M)
    of_columns = column_shift_log2, column_factors
    e = both_exponentials(x, x, row_shift, row_factor, *of_columns, sums, rows, columns)
    if row_factor is not None and out[0] is not None:
        store_weighted(e, norms, out, rows, columns, EVEN_M)
