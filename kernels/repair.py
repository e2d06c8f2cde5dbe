"""What a kernel of row statistics computes again for rows whose shift was too far off, `row_stats` calls it.

The programs of a block of rows share its tiles. E in a tile is taken against the row's maximum in the tile.
The program that is done last knows all these maxima: it finds the row's shift, and multiplies what was stored
of E by the difference. Maxima are rounded up to whole numbers to base 2, so that this multiplies by powers of
2, which rounds nothing. The result is the same whichever program is last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fastqt.kernels.scores.epilogues import EXP, ROW_MAX, load_once, scores_log2, store_tile
from fastqt.kernels.scores.exclusions import (
    add_bias,
    exclude_exact_cells,
    exclude_groups_and_mask,
    exclude_similar,
    load_thresholds,
)
from fastqt.kernels.scores.mainloop import score_tile

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
    thresholds,  # as scores_kernel takes them, or None
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

    row_norm = None
    if norms[0] is not None:
        row_norm = tl.load(norms[0] + row, mask=mask_n, other=0.0)
        scale_log2 = (scale_log2 * row_norm)[:, None]
    row_thresholds = load_thresholds(thresholds, row, mask_n, row_norm)

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
        x = exclude_similar(x, scores, row_thresholds)
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
