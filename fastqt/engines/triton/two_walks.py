"""Gradients with little memory: those of rows from one walk over the scores, those of columns from a second.

Neither walk holds whole rows of E. Each sums up a part of a gradient in float32, of at most as many of its
rows as fill the GPU once, over tiles of E that fit beside it. A gradient that is written later lends its
memory to E: the larger E's tiles are, the less often sums are read and written.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from torch import Tensor

from fastqt.engines.products import multiply
from fastqt.engines.triton import operands
from fastqt.engines.triton.heights import (
    LAUNCH,
    row_multiple,
    side_of_tiles,
    steps,
    tile_time,
    within_a_wave,
)
from fastqt.engines.triton.loop import Loop
from fastqt.engines.triton.operands import Block, Operands, aligned, ranges
from fastqt.kernels.launch import multiprocessors

CHUNK_LAUNCHES = 8  # of a chunk of rows, beside those of its tiles


def run(loop: Loop) -> None:
    """Finds all gradients of a loop's link."""
    o = loop.operands
    if o.needs.queries or o.needs.scale:
        _walk_rows(loop)
    else:
        loop.sum_rows()
        if o.row_negative_gradient is not None:
            loop.finish_queries(slice(0, o.N), None, None)
    for at, block in enumerate(o.blocks):
        if block.gradient is not None or (block.first == 0 and loop.column_sums is not None):
            _walk_columns(loop, block, o.blocks[at + 1 :])


def _walk_rows(loop: Loop) -> None:
    """The gradients of rows, and what is known of these."""
    o, config = loop.operands, loop.scores.config
    lent = _largest(block.gradient for block in o.blocks)
    row_bytes = 4 * o.copies.width + loop.sum_bytes()  # of dF's sum, of sums by tiles
    height, length = _tile_of_rows(
        o.N,
        max(block.matrix.shape[0] for block in o.blocks),
        o.D,
        multiprocessors(o.p.queries),
        o.p.queries.element_size(),
        _size(lent),
        o.room,
        row_bytes,
        row_multiple(config),
        (config.rows, config.columns),
    )
    E = _matrix(o, min(height, o.N), length, lent)
    for rows in ranges(o.N, height):
        loop.row_of_tiles(loop.link, rows, E, in_one_walk=False)


@functools.lru_cache(maxsize=256)
def _tile_of_rows(
    N: int,
    M: int,
    D: int,
    sms: int,
    itemsize: int,
    lent: int,  # elements
    room: int,  # bytes
    row_bytes: int,
    multiple: int,
    tile: tuple[int, int],
) -> tuple[int, int]:
    """Rows and columns of the first walk's tiles of E, beside a sum that takes `row_bytes` a row."""
    across = tile[::-1]

    def shape(height: int) -> tuple[int, int]:
        cells = max(lent, (room - height * row_bytes) // itemsize)
        return height, side_of_tiles(M, cells // height, height, D, sms, tile[1], across)

    def time(shape: tuple[int, int]) -> float:
        return sum(
            rows * (CHUNK_LAUNCHES * LAUNCH + columns * tile_time(length, height, D, sms, across))
            for height, rows in steps(N, shape[0])
            for length, columns in steps(M, shape[1])
        )

    most = (room if lent * itemsize >= room else room // 2) // row_bytes
    return min(map(shape, within_a_wave(N, most, D, sms, multiple)), key=time)


def _walk_columns(loop: Loop, block: Block, later: list[Block]) -> None:
    """The gradients of a block's columns, once all rows are concluded."""
    o, config = loop.operands, loop.scores.config
    elsewhere = _largest(other.gradient for other in later)
    plan = _tiles_of_columns(
        block.matrix.shape[0],
        o.N,
        o.D,
        o.copies.width,
        multiprocessors(o.p.queries),
        o.p.queries.element_size(),
        block.gradient is not None,
        _size(elsewhere),
        o.room,
        operands.ROW_MULTIPLE,
        (config.rows, config.columns),
    )

    for columns, height in plan:
        unwritten = None if block.gradient is None else block.gradient[columns.stop :]
        lent, length = _largest((unwritten, elsewhere)), aligned(columns.stop - columns.start)
        # No name holds a tile while the next is allocated.
        _sum_columns(loop, block, columns, _matrix(o, height, length, lent))


def _sum_columns(loop: Loop, block: Block, columns: slice, E: Tensor) -> None:
    """The gradients of some columns; E is room for a tile."""
    o, queries, n = loop.operands, loop.operands.copies.queries, columns.stop - columns.start
    product = None
    if block.gradient is not None:
        product = o.product_of(block.gradient[columns], alone=len(E) >= o.N)
    for rows in ranges(o.N, len(E)):
        cells = E[: rows.stop - rows.start, :n]
        tile = loop.scores.tile(block, rows, columns)
        with loop.summed_columns(tile) as tile_column_sums:
            loop.link.fill_weighted(tile, cells, tile_column_sums)
        if product is not None:
            multiply(product, cells.T, queries[rows], add=rows.start > 0)
    loop.finish_candidates(block, columns, product)


@functools.lru_cache(maxsize=256)
def _tiles_of_columns(
    M: int,
    N: int,
    D: int,
    width: int,  # of the sums' rows
    sms: int,
    itemsize: int,
    lends: bool,  # the columns' gradient, what of it is not written yet
    elsewhere: int,  # elements of another that is not written yet
    room: int,  # bytes
    multiple: int,
    tile: tuple[int, int],
) -> list[tuple[slice, int]]:
    """The columns whose gradients are summed up at a time, and the rows of E that come at a time."""

    def plan(length: int) -> tuple[float, list[tuple[slice, int]]]:
        time, parts = 0.0, []
        for columns in ranges(M, length):
            n = columns.stop - columns.start
            lent = max((M - columns.stop) * D if lends else 0, elsewhere)
            cells = max(lent, (room - 4 * width * n) // itemsize)
            height = min(side_of_tiles(N, cells // aligned(n), n, D, sms, multiple, tile), N)
            time += sum(count * tile_time(rows, n, D, sms, tile) for rows, count in steps(N, height))
            parts.append((columns, height))
        return time, parts

    lengths = within_a_wave(M, room // 2 // (4 * width), D, sms, max(multiple, tile[1]))
    return min(map(plan, lengths), key=lambda timed: timed[0])[1]


def _largest(gradients: Iterable[Tensor | None]) -> Tensor | None:
    """The one with the most elements, as one row of them."""
    return max((g.reshape(-1) for g in gradients if g is not None), key=len, default=None)


def _size(x: Tensor | None) -> int:
    return 0 if x is None else x.numel()


def _matrix(o: Operands, height: int, length: int, lent: Tensor | None) -> Tensor:
    """Room for a tile of E: in the memory of a gradient to come, if it fits there."""
    if lent is None or len(lent) < height * length:
        return o.p.queries.new_empty(height, length)
    return lent[: height * length].view(height, length)
