"""From rows of cosines to dL/dC of MixCSE's three blocks: dL/dS of each score is added to its cosines.

Scores are sums of two neighbouring cosines, as `fastqt.kernels.three_block` defines them. A cosine C_ij is a
part of up to five scores: those of cell i, j in all three blocks, that of cell i, j - 1 in block 2, and that
of cell i - 1, j in block 3.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.cells import LOG2_E
from fastqt.kernels.launch import cdiv, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.three_block import Lines, Mixtures, RowSums, mixed_exponents

BLOCK_ROWS, BLOCK_COLUMNS = 16, 128  # of a tile


@planned
@triton.jit(do_not_specialize=["first_row", "rows"])
def three_block_gradients_kernel(
    cosines,  # (lines, N) float32
    own_columns,  # (N,) float32, as the three others
    next_columns,
    own_rows,
    next_rows,
    scale,  # () float32
    largest,  # (N,) float32, as the two following
    all_others,
    factors,
    to_queries,  # (rows, N)
    to_candidates,  # (rows, N); if JOINED its values are added to those of the former
    by_scale,  # (blocks of columns, rows) float32
    by_row,  # (blocks of columns, 2, rows) float32: for own_rows and next_rows
    by_column,  # (blocks of rows, 2, N) float32: for own_columns and next_columns
    weight,  # to base 2
    N,
    first_row,
    rows,
    lead,  # the line of the first row
    row_stride,
    gradient_row_stride,
    BOTH: tl.constexpr,
    WEIGHT: tl.constexpr,
    QUERIES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    JOINED: tl.constexpr,
    SCALE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One tile of dL/dC per program: the sum over all scores that its cosines are a part of."""
    i = (tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    j = (tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS))[None, :]

    inside_rows, inside_columns = i < rows, j < N
    inside = inside_rows & inside_columns
    row, line = first_row + i, lead + i
    before, after = tl.where(row > 0, row - 1, N - 1), tl.where(row + 1 < N, row + 1, 0)

    start = cosines + line.to(tl.int64) * row_stride
    near = tl.load(start + j, mask=inside, other=0.0)

    # All sums but the part of the row above lack the row's factor until they are stored.
    s = tl.load(scale) * LOG2_E
    top = tl.load(largest + row, mask=inside_rows, other=0.0)
    factor = tl.load(factors + row, mask=inside_rows, other=0.0)
    others = tl.load(all_others + row, mask=inside_rows, other=0.0)

    on_diagonal = j == row
    # For a positive this is p - 1, computed from the other cells so that it does not cancel.
    first = tl.where(on_diagonal, -others, tl.exp2(s * near - top))
    of_queries, of_scale = first, first * near

    own_column = tl.load(own_columns + j, mask=inside_columns, other=0.0)
    next_column = tl.load(next_columns + j, mask=inside_columns, other=0.0)

    far = tl.load(start + tl.where(j + 1 < N, j + 1, 0), mask=inside, other=0.0)
    second = mixed_exponents(s * own_column, near, s * next_column, far, top, on_diagonal, weight, WEIGHT)
    second = tl.where(j == before, 0.0, tl.exp2(second))

    if SCALE:
        of_scale += second * (own_column * near + next_column * far)
    if SHARES:
        sums = by_column + 2 * tl.program_id(0).to(tl.int64) * N + j
        # A plain product that is added up at once would be fused with the addition, and the copies of a sum
        # that several threads have would differ in their last bit. These are fused with nothing else.
        weighted = factor * second
        of_own, of_next = tl.fma(weighted, near, 0.0), tl.fma(weighted, far, 0.0)
        tl.store(sums, tl.sum(of_own, 0, keep_dims=True), mask=inside_columns)
        tl.store(sums + N, tl.sum(of_next, 0, keep_dims=True), mask=inside_columns)

    if QUERIES:
        # This cosine is also the second part of the score in the column to the left, in block 2.
        left = tl.where(j > 0, j - 1, N - 1)
        nearer = tl.load(start + left, mask=inside, other=0.0)
        own_left = s * tl.load(own_columns + left, mask=inside_columns, other=0.0)
        next_left = tl.load(next_columns + left, mask=inside_columns, other=0.0)
        there = mixed_exponents(own_left, nearer, s * next_left, near, top, left == row, weight, WEIGHT)
        of_left = tl.where(left == before, 0.0, tl.exp2(there))
        of_queries += second * own_column + of_left * next_left

    of_candidates = of_queries if JOINED else first
    if BOTH:
        own_row = tl.load(own_rows + row, mask=inside_rows, other=0.0)
        next_row = tl.load(next_rows + row, mask=inside_rows, other=0.0)
        line_below = tl.where(line + 1 < N, line + 1, 0)
        beneath = tl.load(cosines + line_below.to(tl.int64) * row_stride + j, mask=inside, other=0.0)

        third = mixed_exponents(s * own_row, near, s * next_row, beneath, top, on_diagonal, weight, WEIGHT)
        third = tl.where(j == after, 0.0, tl.exp2(third))
        of_candidates += third * own_row

        if SCALE:
            of_scale += third * (own_row * near + next_row * beneath)
        if SHARES:
            sums = by_row + 2 * tl.program_id(1).to(tl.int64) * rows + i
            of_own, of_next = tl.where(inside, third * near, 0.0), tl.where(inside, third * beneath, 0.0)
            tl.store(sums, factor * tl.sum(of_own, 1, keep_dims=True), mask=inside_rows)
            tl.store(sums + rows, factor * tl.sum(of_next, 1, keep_dims=True), mask=inside_rows)

    of_candidates *= factor
    if BOTH and (CANDIDATES or JOINED):
        # This cosine is also the second part of the score in the row above, in block 3.
        line_above = tl.where(line > 0, line - 1, N - 1)
        above = tl.load(cosines + line_above.to(tl.int64) * row_stride + j, mask=inside, other=0.0)
        own_above = s * tl.load(own_rows + before, mask=inside_rows, other=0.0)
        next_above = tl.load(next_rows + before, mask=inside_rows, other=0.0)
        top_above = tl.load(largest + before, mask=inside_rows, other=0.0)
        factor_above = tl.load(factors + before, mask=inside_rows, other=0.0) * next_above

        there = mixed_exponents(
            own_above, above, s * next_above, near, top_above, j == before, weight, WEIGHT
        )
        of_candidates += factor_above * tl.where(on_diagonal, 0.0, tl.exp2(there))

    if SCALE:
        sums = by_scale + tl.program_id(1).to(tl.int64) * rows + i
        of_scale = tl.where(inside, of_scale, 0.0)
        tl.store(sums, factor * tl.sum(of_scale, 1, keep_dims=True), mask=inside_rows)

    cell = i.to(tl.int64) * gradient_row_stride + j
    if QUERIES:
        folded = of_candidates if JOINED else factor * of_queries
        tl.store(to_queries + cell, folded.to(to_queries.dtype.element_ty), mask=inside)
    if CANDIDATES:
        tl.store(to_candidates + cell, of_candidates.to(to_candidates.dtype.element_ty), mask=inside)


def three_block_gradients(
    lines: Lines,
    mixtures: Mixtures,
    sums: RowSums,
    rows: slice,  # each with a line above it and one below it
    to_queries: Tensor | None,  # (rows, N)
    to_candidates: Tensor | None,  # (rows, N), with the same strides
    *,
    joined: bool,  # whether the gradients of both sides are added up, in to_queries
    scale: bool,  # whether the sums for the scale are wanted
    shares: bool,  # whether the sums for the four shares are wanted
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Writes dL/dC of some rows.

    Returns sums for the scale, (rows,), for own_rows and next_rows, (2, rows), and for own_columns and
    next_columns, (2, N). None of them is multiplied by the scale.
    """
    N, count = lines.cosines.shape[1], rows.stop - rows.start
    m, new = mixtures, lines.cosines.new_empty
    tiles = cdiv(count, BLOCK_ROWS), cdiv(N, BLOCK_COLUMNS)

    # Each tile writes sums of its own and adds nothing atomically, so that equal inputs give equal bits.
    tile_sums = (
        new(tiles[1], count) if scale else None,
        new(tiles[1], 2, count) if shares and m.both else None,
        new(tiles[0], 2, N) if shares else None,
    )

    written = to_candidates if to_queries is None else to_queries
    with on_device(lines.cosines):
        three_block_gradients_kernel[tiles](
            lines.cosines,
            m.own_columns,
            m.next_columns,
            m.own_rows,
            m.next_rows,
            m.scale,
            sums.largest,
            sums.others,
            sums.factors,
            to_queries,
            to_candidates,
            *tile_sums,
            m.weight * LOG2_E.value,
            N,
            rows.start,
            count,
            (rows.start - lines.first) % N,
            lines.cosines.stride(0),
            0 if written is None else written.stride(0),
            BOTH=m.both,
            WEIGHT=m.weight != 0,
            QUERIES=to_queries is not None,
            CANDIDATES=to_candidates is not None,
            JOINED=joined,
            SCALE=scale,
            SHARES=shares,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            num_warps=8,
            enable_fp_fusion=True,
        )

    by_scale, by_row, by_column = (x if x is None else x.sum(0) for x in tile_sums)
    return by_scale, by_row, by_column
