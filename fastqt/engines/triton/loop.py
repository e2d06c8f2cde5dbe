"""The loop over chunks and blocks of the score matrix, the same for every link.

A link says what becomes of scores. It fills a tile of E (exponentials or sigmoids, in the inputs' dtype),
concludes what is known of whole rows, and says what rows are weighted by in sums over columns. The loop
makes the products dF = E G and dG = Eᵀ F, and the gradient epilogues add the exact cells to these.

A chunk of whole rows of E is enough for all gradients at once: three products, 6 N M D operations. Where a
cell's gradient does not depend on its row's sum, tiles of any shape are. memory="low" takes dF from chunks
of whole rows and then dG from chunks of columns, with the scores computed once more: 8 N M D operations, and
no sum in float32 is kept for either.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from fastqt.engines.triton.operands import (
    ROW_MULTIPLE,
    Block,
    Operands,
    aligned,
    even,
    fitting,
    multiply,
    ranges,
)
from fastqt.engines.triton.scores import Scores
from fastqt.kernels.gradients import (
    bias_gradient_epilogue,
    candidate_gradient_epilogue,
    query_gradient_epilogue,
)
from fastqt.kernels.launch import multiprocessors
from fastqt.kernels.scores import Tile, column_tiles, row_tiles

SUM_ROWS = 8192  # whose sums by tiles are kept at once where nothing else is


class Link(Protocol):
    """What becomes of scores."""

    operands: Operands
    scores: Scores

    def whole_rows(self, rows: slice, E: Tensor | None) -> None:
        """Concludes some rows, and fills E (rows, width), if given, with all their columns."""

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E times its rows' weights, once the rows are concluded."""


class RowLink(Link, Protocol):
    """A link whose cells depend on their row's sum: E lacks the row's weight until that sum is known."""

    def column_weights(self, rows: slice) -> Tensor:
        """What some concluded rows of E are multiplied by in sums over columns, float32."""


class CellLink(Link, Protocol):
    """A link whose cells do not depend on others, so that E holds their row's weight from the beginning."""

    def fill(
        self, tile: Tile, out: Tensor | None, tile_row_sums: Tensor | None, tile_column_sums: Tensor | None
    ) -> None:
        """Fills a tile of E, and its sums."""

    def conclude(self, rows: slice, tile_row_sums: Tensor) -> None:
        """Concludes some rows from their sums by tiles."""


def run_rows(link: RowLink) -> None:
    """Finds the losses and gradients of the operands of a link that sums rows."""
    loop, o = _Loop(link), link.operands
    loop.run(lambda: loop.chunks_of_rows(link), in_one_walk=o.p.memory == "fast")


def run_cells(link: CellLink) -> None:
    """Finds the losses and gradients of the operands of a link without row sums."""
    loop, o = _Loop(link), link.operands
    in_one_walk = o.p.memory == "fast" or o.product_bytes <= o.room // 2
    loop.run(lambda: loop.tiles(link), in_one_walk=in_one_walk)


class _Loop:
    """One link's way over the score matrix."""

    def __init__(self, link: Link) -> None:
        self.link, self.operands, self.scores = link, link.operands, link.scores
        self.column_sums = None
        if self.operands.needs.bias:
            self.column_sums = self.operands.p.queries.new_zeros(self.operands.M, dtype=torch.float32)

    def run(self, one_walk: Callable[[], None], *, in_one_walk: bool) -> None:
        """Sums alone where nothing wants a gradient; else all from one walk, or from one for each side."""
        o = self.operands
        if not o.differentiates:
            for rows in ranges(o.N, SUM_ROWS):
                self.link.whole_rows(rows, None)
        elif in_one_walk:
            one_walk()
        else:
            self.rows_then_columns()
        if o.bias_gradient is not None and self.column_sums is not None:
            bias_gradient_epilogue(
                *(self.column_sums, o.weight_norm, o.prob_scale, self.scores.targets_by_column),
                *(self.scores.cells.coefficients, o.bias_gradient),
            )

    def chunks_of_rows(self, link: RowLink) -> None:
        """All gradients from chunks of whole rows."""
        o = self.operands
        itemsize = o.p.queries.element_size()
        row_bytes = itemsize * aligned(o.width) + (4 + itemsize) * o.D
        height = o.fitting_rows(row_bytes)
        E = o.p.queries.new_empty(height, aligned(o.width))
        o.make_products()
        weighted = None
        if any(block.gradient is not None for block in o.blocks):
            weighted = o.p.queries.new_empty(height, o.D)
        for rows in ranges(o.N, height):
            n = rows.stop - rows.start
            link.whole_rows(rows, E[:n])
            self._finish_queries(rows, self._times_columns(E[:n]), weighted)
            for block in o.blocks:
                if block.product is not None and weighted is not None:
                    multiply(block.product, E[:n, block.columns].T, weighted[:n], add=rows.start > 0)
            if self.column_sums is not None:
                weights = link.column_weights(rows).to(E.dtype)
                multiply(self.column_sums[None], weights[None], E[:n, : o.M], add=True)
        if self.column_sums is not None and self.scores.norms.candidates is not None:
            self.column_sums.div_(self.scores.norms.candidates)  # by which E is stored multiplied
        self._finish_all_candidates()

    def tiles(self, link: CellLink) -> None:
        """All gradients from tiles: dF adds up over a chunk's columns, dG over chunks of rows."""
        o, config = self.operands, self.scores.config
        queries = o.p.queries
        height, length = self._tile_shape()
        E = queries.new_empty(height, length)
        o.make_products()
        for rows in ranges(o.N, height):
            n = rows.stop - rows.start
            sums, parts = self.scores.tile_row_sums(rows)
            product = None
            if o.needs.queries or o.needs.scale:
                product = queries.new_empty(n, o.D, dtype=torch.float32)
            for block, part in zip(o.blocks, parts, strict=True):
                for columns in ranges(block.matrix.shape[0], length):
                    cells = E[:n, : columns.stop - columns.start]
                    tile = self.scores.tile(block, rows, columns)
                    begin, end = (column_tiles(at, config) for at in (columns.start, columns.stop))
                    with self._summed_columns(tile) as tile_column_sums:
                        link.fill(tile, cells, part[begin:end], tile_column_sums)
                    if product is not None:
                        first = block.first == 0 and columns.start == 0
                        multiply(product, cells, block.matrix[columns], add=not first)
                    if block.product is not None:
                        multiply(block.product[columns], cells.T, queries[rows], add=rows.start > 0)
            link.conclude(rows, sums)
            self._finish_queries(rows, product, None)
        self._finish_all_candidates()

    def rows_then_columns(self) -> None:
        """dF from chunks of rows, then dG from chunks of columns: neither is kept in float32."""
        o = self.operands
        E = self._rows_at_once()
        for rows in ranges(o.N, len(E)):
            part = E[: rows.stop - rows.start]
            self.link.whole_rows(rows, part)
            self._finish_queries(rows, self._times_columns(part), None)
        del E
        for block in o.blocks:
            sums = self.column_sums if block.first == 0 else None
            if block.gradient is None and sums is None:
                continue
            height, length = self._tile_of_columns(block)
            E = o.p.queries.new_empty(height, length)
            for columns in ranges(block.matrix.shape[0], length):
                product = None
                if block.gradient is not None:
                    product = o.p.queries.new_empty(columns.stop - columns.start, o.D, dtype=torch.float32)
                for rows in ranges(o.N, height):
                    part = E[: rows.stop - rows.start, : columns.stop - columns.start]
                    tile = self.scores.tile(block, rows, columns)
                    with self._summed_columns(tile) as tile_column_sums:
                        self.link.fill_weighted(tile, part, tile_column_sums)
                    if product is not None:
                        multiply(product, part.T, o.p.queries[rows], add=rows.start > 0)
                self._finish_candidates(block, columns, product)

    def _tile_shape(self) -> tuple[int, int]:
        """Rows and columns of tiles that are nearly squares, whose products read and add the least."""
        o = self.operands
        itemsize, room = o.p.queries.element_size(), o.room_beside_products
        widest = max(block.matrix.shape[0] for block in o.blocks)
        row_bytes = 4 * (o.D + column_tiles(o.width, self.scores.config))  # of dF, of sums by tiles
        half = row_bytes / itemsize / 2
        rows = max(min(o.N, int(math.sqrt(half * half + room / itemsize) - half)), 1)
        multiple = 2 * self.scores.config.columns
        length = even(widest, max(int(room / rows - row_bytes) // itemsize, 1), multiple)
        return even(o.N, o.fitting_rows(itemsize * length + row_bytes), ROW_MULTIPLE), length

    def _rows_at_once(self) -> Tensor:
        """Room for whole rows of E, (rows, width): the memory of a gradient to come, if that is more."""
        o = self.operands
        itemsize = o.p.queries.element_size()
        later = [b.gradient.view(-1) for b in o.blocks if b.gradient is not None]
        memory = max(later, key=len, default=None)
        if memory is None or len(memory) * itemsize < o.room:
            memory = o.p.queries.new_empty(o.room // itemsize)
        width = aligned(o.width)
        height = min(fitting(len(memory), width), o.N)
        if height * width > len(memory):  # The smallest chunk is larger than the room.
            return memory.new_empty(height, width)
        return memory[: height * width].view(height, width)

    def _tile_of_columns(self, block: Block) -> tuple[int, int]:
        """Rows and columns of E that fit the room beside a sum over rows for each of the columns."""
        o = self.operands
        queries, columns = o.p.queries, block.matrix.shape[0]
        itemsize = queries.element_size()
        # The vendor cuts the product into tiles of 128 x 256, which then fill all multiprocessors once.
        one_wave = 128 * max(multiprocessors(queries) // math.ceil(o.D / 256), 1)
        length = min(one_wave, fitting(o.room // 2, 4 * o.D), aligned(columns))
        height = fitting(o.room - 4 * o.D * length, itemsize * length)
        return even(o.N, min(height, o.N), ROW_MULTIPLE), length

    @contextlib.contextmanager
    def _summed_columns(self, tile: Tile) -> Iterator[Tensor | None]:
        """Room for the sums of a tile's columns, if a bias wants them; then adds these up."""
        if self.column_sums is None or tile.target_starts is None:  # Negatives have no biases.
            yield None
            return
        columns = tile.candidates.shape[0]
        sums = self.column_sums.new_empty(row_tiles(tile.rows, self.scores.config), columns)
        yield sums
        self.column_sums[tile.first_column : tile.first_column + columns].add_(sums.sum(0))

    def _times_columns(self, E: Tensor) -> Tensor | None:
        """E G over all blocks, float32, if anything needs it."""
        o = self.operands
        if not (o.needs.queries or o.needs.scale):
            return None
        product = o.p.queries.new_empty(E.shape[0], o.D, dtype=torch.float32)
        for block in o.blocks:
            multiply(product, E[:, block.columns], block.matrix, add=block.first > 0)
        return product

    def _finish_queries(self, rows: slice, product: Tensor | None, weighted: Tensor | None) -> None:
        o = self.operands
        query_gradient_epilogue(
            *(o.p.queries, o.p.candidates, o.scale, product, self.scores.cells, self.scores.state),
            *(o.weight_norm, o.prob_scale, rows.start, rows.stop - rows.start),
            query_gradient=o.query_gradient,
            weighted_queries=weighted,
            row_negative_gradient=o.row_negative_gradient,
            scale_gradient=o.scale_gradient,
            inverse_norms=self.scores.norms.of_pair(o.blocks[0]),
        )

    def _finish_all_candidates(self) -> None:
        for block in self.operands.blocks:
            self._finish_candidates(block, slice(0, block.matrix.shape[0]), block.product)

    def _finish_candidates(self, block: Block, columns: slice, product: Tensor | None) -> None:
        if block.gradient is None or product is None:
            return
        o, by_column = self.operands, None
        if block.first == 0:
            starts, targets, target_rows = self.scores.targets_by_column
            by_column = starts[columns.start :], targets, target_rows
        candidate_gradient_epilogue(
            *(o.p.queries, o.scale, product, o.weight_norm, o.prob_scale, block.gradient[columns]),
            by_column=by_column,
            coefficients=self.scores.cells.coefficients,
            candidates=block.matrix[columns] if o.p.normalize else None,
            inverse_norms=self.scores.norms.of_pair(block, columns),
        )
