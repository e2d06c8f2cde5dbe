"""The score matrix's product with the exponential in its epilogue: no score reaches memory.

For rows i and columns j it computes E_ij = exp(s <f_i, g_j> - r_i) against a reference r_i of
the row, and the sum of each row. Cells that others answer for are 0 in E: targets, whose
exact coefficient the row kernels compute from float32 scores, and the replaced diagonal. So
are cells that a mask or equal groups exclude.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from fastqt.kernels.launch import Config, compute_dtype, on_device, precision, programs
from torch import Tensor


@triton.jit
def scores_kernel(
    queries,  # (N, D)
    candidates,  # (columns, D)
    scale,  # () float32
    references,  # (N,) float32
    factors,  # (N,) float32, of what is stored, if FACTORS
    exponentials,  # (rows, columns), written if STORE
    partial,  # (blocks of columns, rows) float32: sums, or maxima of the scores, if REDUCE
    redo,  # (N,) int32, read if ONLY_REDO
    any_redo,  # () int32
    target_starts,  # (N + 1,) int64
    target_columns,  # (targets,) int64, -1 for none
    query_groups,  # (N,) int64
    candidate_groups,  # (M,) int64
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
    REDUCE: tl.constexpr,
    STORE: tl.constexpr,
    FACTORS: tl.constexpr,
    ONLY_REDO: tl.constexpr,
    LEAVE_OUT_DIAGONAL: tl.constexpr,
    TARGETS: tl.constexpr,
    GROUPS: tl.constexpr,
    MASK: tl.constexpr,
    EVEN_WIDTH: tl.constexpr,
    UNIT: tl.constexpr,  # of elements, in which the width and the row strides are given
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    column_blocks = tl.cdiv(columns, BLOCK_COLUMNS)
    tiles = row_blocks * column_blocks
    # As products with UNIT the compiler knows of what they are multiples.
    width *= UNIT
    query_row_stride *= UNIT
    candidate_row_stride *= UNIT
    if ONLY_REDO:
        tiles *= tl.load(any_redo)
    s = tl.load(scale)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        # Tiles of a few row blocks first, so that what they load stays in the L2 cache.
        group = tile // (GROUP_ROWS * column_blocks)
        group_rows = min(row_blocks - group * GROUP_ROWS, GROUP_ROWS)
        in_group = tile % (GROUP_ROWS * column_blocks)
        row_block = group * GROUP_ROWS + in_group % group_rows
        column_block = in_group // group_rows

        in_rows, in_columns = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
        i, j = row_block * BLOCK_ROWS + in_rows, column_block * BLOCK_COLUMNS + in_columns
        row_inside, column_inside = i < rows, j < columns
        row, column = first_row + i, first_column + j
        if ONLY_REDO:
            written = row_inside & (tl.load(redo + row, mask=row_inside, other=0) > 0)
            needed = tl.max(written.to(tl.int32), 0) > 0
        else:
            written = row_inside
            needed = True
        if needed:
            k = tl.arange(0, BLOCK_WIDTH)
            # Rows beyond the end are read as earlier ones: their results are dropped.
            f = (
                queries
                + (first_row + i % rows).to(tl.int64)[:, None] * query_row_stride
                + k[None, :] * query_stride
            )
            g = (
                candidates
                + (j % columns).to(tl.int64)[None, :] * candidate_row_stride
                + k[:, None] * candidate_stride
            )
            scores = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), dtype=tl.float32)
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
            scores *= s

            # Cells are left out one condition after another: to keep them all would take a register a cell.
            scores = tl.where(column_inside[None, :], scores, float("-inf"))
            if LEAVE_OUT_DIAGONAL:
                scores = tl.where(row[:, None] == column[None, :], float("-inf"), scores)
            if GROUPS:
                own = tl.load(query_groups + row, mask=row_inside, other=0)
                theirs = tl.load(candidate_groups + column, mask=column_inside, other=0)
                scores = tl.where(own[:, None] == theirs[None, :], float("-inf"), scores)
            if MASK:
                begin = mask + tl.cast(first_row + row_block * BLOCK_ROWS, tl.int64) * mask_row_stride
                begin += tl.cast(first_column + column_block * BLOCK_COLUMNS, tl.int64) * mask_stride
                cell = in_rows[:, None] * mask_row_stride + in_columns[None, :] * mask_stride
                inside = row_inside[:, None] & column_inside[None, :]
                masked = tl.load(begin + cell, mask=inside, other=0) != 0
                scores = tl.where(masked, float("-inf"), scores)
            if TARGETS:
                first = tl.load(target_starts + row, mask=row_inside, other=0)
                count = tl.load(target_starts + row + 1, mask=row_inside, other=0) - first
                left = first_column + column_block * BLOCK_COLUMNS
                for target in tl.range(0, tl.max(count, 0), num_stages=1):
                    at = tl.load(target_columns + first + target, mask=target < count, other=-1)
                    if tl.max(((at >= left) & (at < left + BLOCK_COLUMNS)).to(tl.int32), 0) > 0:
                        scores = tl.where(at[:, None] == column[None, :], float("-inf"), scores)

            if REDUCE:
                partial_at = partial + tl.cast(column_block, tl.int64) * rows + i
            if MAXIMUM:
                tl.store(partial_at, tl.max(scores, 1), mask=written)
            else:
                reference = tl.load(references + row, mask=row_inside, other=0.0)
                e = tl.exp(scores - reference[:, None])
                if REDUCE:
                    tl.store(partial_at, tl.sum(e, 1), mask=written)
                if FACTORS:
                    e *= tl.load(factors + row, mask=row_inside, other=0.0)[:, None]
                if STORE:
                    # Offsets within a tile fit 32 bits, which halves the registers that addresses take.
                    begin = exponentials + tl.cast(row_block * BLOCK_ROWS, tl.int64) * exponential_row_stride
                    cell = in_rows[:, None] * exponential_row_stride + in_columns[None, :]
                    tl.store(
                        begin + column_block * BLOCK_COLUMNS + cell,
                        e.to(exponentials.dtype.element_ty),
                        mask=written[:, None] & column_inside[None, :],
                    )


@dataclass(frozen=True)
class Tile:
    """Some rows against some columns of the score matrix, and which of its cells are left out of E."""

    first_row: int
    rows: int
    candidates: Tensor  # (columns, D): those columns'
    first_column: int = 0
    leave_out_diagonal: bool = False
    target_starts: Tensor | None = None  # (N + 1,) int64
    target_columns: Tensor | None = None  # (targets,) int64, -1 for none
    query_groups: Tensor | None = None  # (N,) int64
    candidate_groups: Tensor | None = None  # (M,) int64
    mask: Tensor | None = None  # (N, M) bool


def column_blocks(columns: int, config: Config) -> int:
    return triton.cdiv(columns, config.columns)


def exp_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    references: Tensor,  # (N,) float32
    config: Config,
    *,
    exponentials: Tensor | None = None,  # (rows, columns), rows contiguous
    factors: Tensor | None = None,  # (N,) float32
    partial: Tensor | None = None,  # (column_blocks, rows) float32
    redo: tuple[Tensor, Tensor] | None = None,  # (N,) and () int32: only these rows, if any
) -> None:
    """Row sums of E by blocks of columns into `partial`, and E, times `factors`, into `exponentials`."""
    _launch(tile, queries, scale, references, factors, exponentials, partial, redo, config)


def max_scores(
    tile: Tile,
    queries: Tensor,  # (N, D)
    scale: Tensor,  # () float32
    partial: Tensor,  # (column_blocks, rows) float32
    config: Config,
    *,
    redo: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Row maxima of the scores by blocks of columns; -inf where all cells are left out."""
    _launch(tile, queries, scale, None, None, None, partial, redo, config)


def _launch(
    tile: Tile,
    queries: Tensor,
    scale: Tensor,
    references: Tensor | None,
    factors: Tensor | None,
    exponentials: Tensor | None,
    partial: Tensor | None,
    redo: tuple[Tensor, Tensor] | None,
    config: Config,
) -> None:
    columns, width = tile.candidates.shape
    tiles = triton.cdiv(tile.rows, config.rows) * column_blocks(columns, config)
    flags, any_flag = redo or (None, None)
    # Sixteen bytes are copied at a time where rows begin at multiples of them; else single elements,
    # with an address each, of which a program can hold only so many.
    unit = 16 // queries.element_size()
    if any(n % unit for n in (width, queries.stride(0), tile.candidates.stride(0))):
        unit = 1
    step = config.width if unit > 1 else 16
    with on_device(queries):
        scores_kernel[(tiles if redo is None else programs(queries, tiles),)](
            *(queries, tile.candidates, scale, references, factors, exponentials, partial, flags, any_flag),
            *(tile.target_starts, tile.target_columns),
            *(tile.query_groups, tile.candidate_groups, tile.mask),
            *(tile.rows, columns, width // unit, tile.first_row, tile.first_column),
            *(queries.stride(0) // unit, queries.stride(1)),
            *(tile.candidates.stride(0) // unit, tile.candidates.stride(1)),
            0 if exponentials is None else exponentials.stride(0),
            *((0, 0) if tile.mask is None else tile.mask.stride()),
            MAXIMUM=references is None,
            REDUCE=partial is not None,
            STORE=exponentials is not None,
            FACTORS=factors is not None,
            ONLY_REDO=redo is not None,
            LEAVE_OUT_DIAGONAL=tile.leave_out_diagonal,
            TARGETS=tile.target_starts is not None,
            GROUPS=tile.query_groups is not None,
            MASK=tile.mask is not None,
            EVEN_WIDTH=width % step == 0,
            UNIT=unit,
            COMPUTE=compute_dtype(queries.dtype),
            PRECISION=precision(),
            BLOCK_ROWS=config.rows,
            BLOCK_COLUMNS=config.columns,
            BLOCK_WIDTH=step,
            GROUP_ROWS=config.group,
            num_warps=config.warps,
            num_stages=config.stages,
        )
