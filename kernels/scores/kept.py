"""CLIP's epilogue of scores that were kept, without their product.

The scores are read in float32, as the epilogue has them in registers, so that the results are the same. A
cell costs the memory 4 bytes when it is written and 4 when it is read, in place of D multiplications.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import INTERPRETED, Config, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.scores.epilogues import both_exponentials, store_weighted
from fastqt.kernels.scores.tile import Tile, column_tiles, row_tiles

# Threads hold three values of each of their cells: with 32 cells they take few enough registers that the
# loads of other programs are under way meanwhile.
KEPT = Config(rows=16, columns=32) if INTERPRETED else Config(rows=32, columns=128, warps=4)


@planned
@triton.jit
def kept_scores_kernel(
    scores,  # (N, M) float32, to base 2, -inf in excluded cells
    N,
    M,
    first_n,  # of the rows among all rows
    stride_n,
    stride_out_n,
    stride_mask_n,  # of both masks
    row_shifts_stride,  # between the rows of (MULTIPLES, all rows)
    column_shifts_stride,  # between the rows of (MULTIPLES, M)
    EVEN_M: tl.constexpr,  # BLOCK_M divides M
    MULTIPLES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    row_shift_log2,  # (MULTIPLES, all rows) float32
    column_shift_log2,  # (MULTIPLES, M) float32
    multiples=None,  # (MULTIPLES,) float32, of the scores; None: one, of 1
    row_factors=None,  # as row_shift_log2, given with `out`
    column_factors=None,  # as column_shift_log2, likewise
    row_mask=None,  # (N, M) bool: cells that leave the softmax of their row, given with the following
    column_mask=None,  # (N, M) bool: those that leave the softmax of their column
    out=None,  # (N, M): E
    tile_row_sums=None,  # (blocks of columns, N) float32, of one multiple
    tile_column_sums=None,  # (blocks of rows, M) float32
    query_inverse_norms=None,  # (all rows,) float32, given with the following: scores are cosines
    candidate_inverse_norms=None,  # (M,) float32
):
    blocks_m = tl.cdiv(M, BLOCK_M)
    block_n, block_m = tl.program_id(0) // blocks_m, tl.program_id(0) % blocks_m
    start_n, start_m = block_n * BLOCK_N, block_m * BLOCK_M
    offs_n, offs_m = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    mask_n, mask_m = offs_n < N - start_n, offs_m < M - start_m
    row = first_n + start_n + offs_n
    rows, columns = (start_n, offs_n, mask_n), (start_m, offs_m, mask_m)

    # All that is kept is too little for offsets within a tile of more than 32 bits.
    inside = mask_n[:, None]
    if not EVEN_M:
        inside = inside & mask_m[None, :]
    start = scores + tl.cast(start_n, tl.int64) * stride_n + start_m
    x = tl.load(start + offs_n[:, None] * stride_n + offs_m[None, :], mask=inside, other=float("-inf"))

    of_rows, of_columns = x, x
    if row_mask is not None:
        first = tl.cast(start_n, tl.int64) * stride_mask_n + start_m
        cell = first + offs_n[:, None] * stride_mask_n + offs_m[None, :]
        of_rows = tl.where(tl.load(row_mask + cell, mask=inside, other=0) != 0, float("-inf"), x)
        of_columns = tl.where(tl.load(column_mask + cell, mask=inside, other=0) != 0, float("-inf"), x)

    row_norm, row_sums_at, column_sums_at = None, None, None
    if query_inverse_norms is not None:
        row_norm = tl.load(query_inverse_norms + row, mask=mask_n, other=0.0)
    if tile_row_sums is not None:
        row_sums_at = tile_row_sums + tl.cast(block_m, tl.int64) * N + start_n + offs_n
    if tile_column_sums is not None:
        column_sums_at = tile_column_sums + tl.cast(block_n, tl.int64) * M + (start_m + offs_m)
    sums = row_sums_at, column_sums_at

    e = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for k in tl.static_range(MULTIPLES):
        multiple = 1.0
        if multiples is not None:
            multiple = tl.load(multiples + k)
        of_row = k * row_shifts_stride + row
        row_shift = tl.load(row_shift_log2 + of_row, mask=mask_n, other=float("inf"))
        row_factor, column_factor = None, None
        if row_factors is not None:
            row_factor = tl.load(row_factors + of_row, mask=mask_n, other=0.0)
            column_factor = column_factors + k * column_shifts_stride
        shifts = column_shift_log2 + k * column_shifts_stride
        part = both_exponentials(
            of_rows * multiple,
            of_columns * multiple,
            row_shift,
            row_factor,
            shifts,
            column_factor,
            sums,
            rows,
            columns,
        )
        e = part if MULTIPLES == 1 else e + part

    if out is not None:
        norms = row_norm, candidate_inverse_norms
        store_weighted(e, norms, (out, stride_out_n), rows, columns, EVEN_M)


def kept_row_and_column_scores(
    tile: Tile,
    scores: Tensor,  # (rows, columns) float32, what `row_and_column_scores` has kept of the tile
    row_shift_log2: tuple[Tensor, Tensor],  # (multiples, N) and (multiples, columns) float32
    *,
    multiples: Tensor | None = None,  # (multiples,) float32, of the scores; None: one, of 1
    masks: tuple[Tensor, Tensor] | None = None,  # (rows, columns) bool: cells that leave rows, and columns
    factors: tuple[Tensor, Tensor] | None = None,  # (multiples, N) and (multiples, columns) float32
    total: Tensor | None = None,  # (rows, columns), rows contiguous
    tile_row_sums: Tensor | None = None,  # (column_tiles of KEPT, rows) float32
    tile_column_sums: Tensor | None = None,  # (row_tiles of KEPT, columns) float32
) -> None:
    """Writes what `row_and_column_scores` does, from scores that it has kept.

    The sums are those of one multiple. `total` is that of all multiples, added up.
    """
    rows, columns = scores.shape
    of_rows, of_columns = row_shift_log2
    row_factors, column_factors = factors or (None, None)
    row_mask, column_mask = masks or (None, None)
    tiles = row_tiles(rows, KEPT) * column_tiles(columns, KEPT)

    with on_device(scores):
        kept_scores_kernel[(tiles,)](
            scores,
            rows,
            columns,
            tile.first_row,
            scores.stride(0),
            0 if total is None else total.stride(0),
            0 if row_mask is None else row_mask.stride(0),
            of_rows.stride(0),
            of_columns.stride(0),
            EVEN_M=columns % KEPT.columns == 0,
            MULTIPLES=len(of_rows),
            BLOCK_N=KEPT.rows,
            BLOCK_M=KEPT.columns,
            row_shift_log2=of_rows,
            column_shift_log2=of_columns,
            multiples=multiples,
            row_factors=row_factors,
            column_factors=column_factors,
            row_mask=row_mask,
            column_mask=column_mask,
            out=total,
            tile_row_sums=tile_row_sums,
            tile_column_sums=tile_column_sums,
            query_inverse_norms=tile.query_inverse_norms,
            candidate_inverse_norms=tile.candidate_inverse_norms,
            num_warps=KEPT.warps,
            enable_fp_fusion=True,
        )
