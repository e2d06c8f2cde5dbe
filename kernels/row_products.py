"""The product E G of the few rows whose shift overflowed, when E is no longer in memory.

Each program looks at the flags of its rows and returns where none is set, as is the case of nearly all. The
others compute the exponentials of their rows once more, and multiply them while they are in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.addresses import elements_at_once, far, strides_of_64_bits
from fastqt.kernels.cells import LOG2_E, RowState
from fastqt.kernels.launch import block, cdiv, compute_dtype, on_device, precision
from fastqt.kernels.plan import planned
from fastqt.kernels.scores.epilogues import EXP, load_once, scores_log2
from fastqt.kernels.scores.exclusions import (
    add_bias,
    exclude_exact_cells,
    exclude_groups_and_mask,
    exclude_similar,
    load_row_targets,
    load_thresholds,
)
from fastqt.kernels.scores.mainloop import score_tile
from fastqt.kernels.scores.tile import Tile
from fastqt.kernels.tf32 import rounded_to_tf32

ROWS, COLUMNS, WIDTH = 64, 64, 128  # of E and of the product, of a program


@planned
@triton.jit
def row_products_kernel(
    queries,  # (all rows, D)
    candidates,  # (M, D)
    scale,  # () float32
    shift_overflowed,  # (all rows,) int32: only rows where it is not 0 are written
    row_shift_log2,  # (all rows,) float32
    product,  # (N, D) float32, or of the gradient's dtype where nothing is added
    N,  # rows of this launch
    M,
    D,
    first_n,  # of the rows among all rows
    stride_qn,
    stride_qd,
    stride_cm,
    stride_cd,
    stride_mask_n,
    stride_mask_m,
    EXCLUDE_DIAGONAL: tl.constexpr,
    EVEN_D: tl.constexpr,
    ADD: tl.constexpr,  # to what is there
    FAR: tl.constexpr,  # as scores_kernel takes it
    UNIT: tl.constexpr,  # of elements, in which D, stride_qn and stride_cm are given
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,  # of a step of the scores' product
    BLOCK_WIDTH: tl.constexpr,  # of the product E G
    bias=None,  # (M,) float32
    target_starts=None,  # as scores_kernel takes them
    target_columns=None,
    lowest_targets=None,
    highest_targets=None,
    query_groups=None,
    candidate_groups=None,
    mask=None,
    query_inverse_norms=None,
    candidate_inverse_norms=None,
    thresholds=None,
):
    if FAR:
        stride_qn, stride_qd = strides_of_64_bits((stride_qn, stride_qd))
        stride_cm, stride_cd = strides_of_64_bits((stride_cm, stride_cd))
        stride_mask_n, stride_mask_m = strides_of_64_bits((stride_mask_n, stride_mask_m))

    D *= UNIT
    tl.assume(D > 0)
    stride_qn *= UNIT
    stride_cm *= UNIT

    blocks_d = tl.cdiv(D, BLOCK_WIDTH)
    start_n = tl.program_id(0) // blocks_d * BLOCK_N
    offs_n = tl.arange(0, BLOCK_N)
    mask_n = offs_n < N - start_n

    row = first_n + start_n + offs_n
    written = mask_n & (tl.load(shift_overflowed + row, mask=mask_n, other=0) > 0)

    # Nearly all programs end here.
    if tl.max(written.to(tl.int32), 0) > 0:
        scale_log2 = tl.load(scale) * LOG2_E
        row_norm = None
        if query_inverse_norms is not None:
            row_norm = tl.load(query_inverse_norms + row, mask=mask_n, other=0.0)
            scale_log2 = (scale_log2 * row_norm)[:, None]
        row_thresholds = load_thresholds(thresholds, row, mask_n, row_norm)

        row_shift = tl.load(row_shift_log2 + row, mask=mask_n, other=0.0)
        row_targets = None
        if target_starts is not None:
            targets = target_starts, target_columns, lowest_targets, highest_targets
            row_targets = load_row_targets(targets, row, mask_n)

        # A program has some columns of the product, and computes E of its rows anew for them.
        d = tl.program_id(0) % blocks_d * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
        at = product + tl.cast(start_n, tl.int64) * D + offs_n[:, None] * D + d[None, :]
        cells = written[:, None] & (d < D)[None, :]
        total = tl.zeros((BLOCK_N, BLOCK_WIDTH), dtype=tl.float32)
        if ADD:
            total = tl.load(at, mask=cells, other=0.0)

        for start_m in tl.range(0, M, BLOCK_M, disable_licm=True):
            offs_m = tl.arange(0, BLOCK_M)
            mask_m = offs_m < M - start_m

            scores = score_tile(
                queries,
                candidates,
                (stride_qn, stride_qd, stride_cm, stride_cd),
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
            if query_inverse_norms is not None:
                scores *= load_once(candidate_inverse_norms, columns)[None, :]

            x = scores_log2(scores, scale_log2, row_shift, mask_n, EXP)
            x = add_bias(x, bias, start_m, offs_m, mask_m)
            x = exclude_similar(x, scores, row_thresholds)
            x = tl.where(mask_m[None, :], x, float("-inf"))

            corner, indices = (first_n + start_n, start_m), (row, start_m + offs_m)
            groups, cell_mask = (query_groups, candidate_groups), (mask, stride_mask_n, stride_mask_m)
            x = exclude_groups_and_mask(
                x, corner, (offs_n, offs_m), indices, (mask_n, mask_m), groups, cell_mask
            )
            x = exclude_exact_cells(x, corner, indices, row_targets, target_columns, EXCLUDE_DIAGONAL)

            g_rows = candidates + tl.cast(start_m, tl.int64) * stride_cm + offs_m[:, None] * stride_cm
            inside = mask_m[:, None] & (d < D)[None, :]
            g = tl.load(g_rows + d[None, :] * stride_cd, mask=inside, other=0.0)

            e = tl.exp2(x)
            if query_inverse_norms is not None:
                e *= load_once(candidate_inverse_norms, columns)[None, :]
            e, g = e.to(COMPUTE), g.to(COMPUTE)
            if PRECISION == "tf32":
                e, g = rounded_to_tf32(e), rounded_to_tf32(g)
            total = tl.dot(e, g, total, input_precision=PRECISION)

        tl.store(at, total, mask=cells)


def multiply_overflowed_rows(
    tile: Tile,  # some rows against all candidates, or against all negatives
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    state: RowState,
    product: Tensor,  # (rows, D), contiguous; float32 if `add`
    *,
    add: bool,
) -> None:
    """product (+)= E candidates in the rows that are flagged, with their shift of now."""
    D, matrix = queries.shape[1], tile.candidates

    unit = elements_at_once(queries, matrix)
    step = 32 if unit > 1 else 16
    # Operands of four bytes, and addresses of single elements, take twice the registers.
    rows = ROWS if unit == 8 else ROWS // 2
    width = max(block(D, WIDTH), 16)

    with on_device(queries):
        row_products_kernel[(cdiv(tile.rows, rows) * cdiv(D, width),)](
            queries,
            matrix,
            scale,
            state.shift_overflowed,
            state.row_shift_log2,
            product,
            tile.rows,
            matrix.shape[0],
            D // unit,
            tile.first_row,
            queries.stride(0) // unit,
            queries.stride(1),
            matrix.stride(0) // unit,
            matrix.stride(1),
            *tile.mask_strides,
            EXCLUDE_DIAGONAL=tile.exclude_diagonal,
            EVEN_D=D % step == 0,
            ADD=add,
            # A program reads `width` elements of all D of a candidate at once.
            FAR=far((queries, rows, step), (matrix, COLUMNS, D), (tile.mask, rows, COLUMNS)),
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=precision(queries.dtype),
            BLOCK_N=rows,
            BLOCK_M=COLUMNS,
            BLOCK_D=step,
            BLOCK_WIDTH=width,
            target_starts=tile.target_starts,
            target_columns=tile.target_columns,
            **tile.operands,
            num_warps=4 if unit == 4 else 8,
            num_stages=2,
            enable_fp_fusion=True,
        )
