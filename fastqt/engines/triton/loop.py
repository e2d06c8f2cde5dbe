"""The loop over chunks and blocks of the score matrix, the same for every link.

A link says what becomes of scores. It fills a tile of E (exponentials or sigmoids, in the inputs' dtype),
concludes what is known of whole rows, and says what rows are weighted by in sums over columns. The loop
makes the products dF = E G and dG = Eᵀ F, and the gradient epilogues add the exact cells to these.

A chunk of whole rows of E is enough for all gradients at once: three products, 6 N M D operations. Where a
cell's gradient does not depend on its row's sum, tiles of any shape are. memory="low" takes dF from chunks
of whole rows and then dG from chunks of columns, with the scores computed once more: 8 N M D operations, and
no sum in float32 is kept for either. `walks` chooses between the two.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from fastqt.engines.products import multiply
from fastqt.engines.triton.heights import chunk_rows, columns_that_fit, rows_that_fit
from fastqt.engines.triton.operands import Block, Operands, aligned, fitting, ranges
from fastqt.engines.triton.scores import Scores
from fastqt.kernels.gradients import candidate_gradient_epilogue, query_gradient_epilogue
from fastqt.kernels.scores import Tile, column_tiles, row_tiles
from fastqt.kernels.tuning import REPAIR

SUM_ROWS = 8192  # whose sums by tiles are kept at once where nothing else is


class Link(Protocol):
    """What becomes of scores."""

    operands: Operands
    scores: Scores

    def whole_rows(self, rows: slice, E: Tensor | None) -> None:
        """Concludes some rows, and fills E (rows, width), if given, with all their columns."""

    def begin(self, rows: slice) -> None:
        """Finds what has to be known of some rows before tiles of them are filled."""

    def fill(
        self, tile: Tile, out: Tensor | None, tile_row_sums: Tensor | None, tile_column_sums: Tensor | None
    ) -> None:
        """Fills a tile of E, and its sums."""

    def conclude(self, rows: slice, tile_row_sums: Tensor, product: Tensor | None) -> None:
        """Concludes some rows from their sums by tiles.

        E with their final shift has the product with all columns that `product`, if given, then holds.
        """

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E times its rows' weights, once the rows are concluded."""


class RowLink(Link, Protocol):
    """A link whose cells depend on their row's sum: E lacks the row's weight until that sum is known."""

    @property
    def exponentials(self) -> Tensor | None:
        """E of all rows (N, width), if it is there before they are concluded."""

    def column_weights(self, rows: slice) -> Tensor:
        """What some concluded rows of E are multiplied by in sums over columns, float32."""


class CellLink(Link, Protocol):
    """A link whose cells do not depend on others, so that E holds their row's weight from the beginning."""


class Loop:
    """One link's way over the score matrix."""

    def __init__(self, link: Link) -> None:
        self.link, self.operands, self.scores = link, link.operands, link.scores
        self.column_sums = None
        if self.operands.needs.bias:
            self.column_sums = self.operands.p.queries.new_zeros(self.operands.M, dtype=torch.float32)

    def sum_rows(self) -> None:
        """Concludes all rows, and nothing else."""
        o = self.operands
        for rows in ranges(o.N, min(SUM_ROWS, fitting(o.room, self.sum_bytes()))):
            self.link.whole_rows(rows, None)

    def chunks_of_rows(self, link: RowLink) -> None:
        """All gradients from chunks of whole rows."""
        o = self.operands
        height = chunk_rows(o, self.row_bytes(), self.scores.config)
        kept = link.exponentials
        room = o.p.queries.new_empty(height, aligned(o.width)) if kept is None else kept
        o.make_products(alone=height >= o.N)

        weighted = None
        if any(block.gradient is not None for block in o.blocks):
            # Where it is wider than the embeddings, nothing writes the rest, nor reads it of the product.
            weighted = o.p.queries.new_empty(height, o.copies.width)

        for rows in ranges(o.N, height):
            n = rows.stop - rows.start
            E = room[:n] if kept is None else kept[rows]
            link.whole_rows(rows, E)
            self.finish_queries(rows, self._times_columns(rows, E), weighted)
            for block in o.blocks:
                if block.product is not None and weighted is not None:
                    multiply(block.product, E[:, block.columns].T, weighted[:n], add=rows.start > 0)
            if self.column_sums is not None:
                weights = link.column_weights(rows).to(E.dtype)
                multiply(self.column_sums[None], weights[None], E[:, : o.M], add=True)

        if self.column_sums is not None and self.scores.norms.candidates is not None:
            self.column_sums.div_(self.scores.norms.candidates)  # by which E is stored multiplied
        self._finish_all_candidates(weighted=weighted is not None)

    def tiles(self, link: CellLink) -> None:
        """All gradients from tiles: dF adds up over a chunk's columns, dG over chunks of rows."""
        o = self.operands
        height, length = self._tile_shape()
        E = o.p.queries.new_empty(height, length)
        o.make_products(alone=height >= o.N)
        for rows in ranges(o.N, height):
            self.row_of_tiles(link, rows, E, in_one_walk=True)
        self._finish_all_candidates()

    def row_of_tiles(self, link: Link, rows: slice, E: Tensor, *, in_one_walk: bool) -> None:
        """Concludes a chunk of rows and finishes their gradients; E is room for a tile.

        In one walk the sums of columns, and those of the columns' gradients, grow by the chunk's part.
        """
        o = self.operands
        link.begin(rows)
        sums, parts = self.scores.tile_row_sums(rows)
        product = o.product_of_queries(rows, alone=E.shape[1] >= o.width)
        for block, part in zip(o.blocks, parts, strict=True):
            for columns, tile, cells in self._tiles_of(block, rows, E):
                begin, end = (column_tiles(at, self.scores.config) for at in (columns.start, columns.stop))
                with self.summed_columns(tile if in_one_walk else None) as tile_column_sums:
                    link.fill(tile, cells, part[begin:end], tile_column_sums)
                if product is not None:
                    multiply(product, cells, block.operand[columns], add=block.first + columns.start > 0)
                if in_one_walk and block.product is not None:
                    multiply(block.product[columns], cells.T, o.copies.queries[rows], add=rows.start > 0)
        link.conclude(rows, sums, product)
        self.finish_queries(rows, product, None)

    def _tiles_of(self, block: Block, rows: slice, E: Tensor) -> Iterator[tuple[slice, Tile, Tensor]]:
        """The columns of each tile of a chunk of rows, the tile, and its part of E."""
        height, length = rows.stop - rows.start, E.shape[1]
        for columns in ranges(block.matrix.shape[0], length):
            cells = E[:height, : columns.stop - columns.start]
            yield columns, self.scores.tile(block, rows, columns), cells

    def row_bytes(self) -> int:
        """What a row of E takes, with its sums by tiles, its part of dF's sum and its weighted query."""
        o, itemsize = self.operands, self.operands.p.queries.element_size()
        return itemsize * aligned(o.width) + (4 + itemsize) * o.copies.width + self.sum_bytes()

    def sum_bytes(self) -> int:
        """What a row's sums by tiles take, with the sums and maxima by which it may be repaired."""
        of_scores = column_tiles(self.operands.width, self.scores.config)
        sums: int = 4 * of_scores + 2 * 4 * column_tiles(self.operands.width, REPAIR)
        return sums

    def _tile_shape(self) -> tuple[int, int]:
        """Rows and columns of tiles that are nearly squares, whose products read and add the least."""
        o, config = self.operands, self.scores.config
        itemsize, room = o.p.queries.element_size(), o.room_beside_products
        row_bytes = 4 * (o.copies.width + column_tiles(o.width, config))  # of dF, of sums by tiles
        half = row_bytes / itemsize / 2
        square = int(math.sqrt(half * half + room / itemsize) - half)
        height = rows_that_fit(o, square, config)
        most = (room // height - row_bytes) // itemsize
        # A tile's sums of rows are those of whole tiles of the scores' kernel.
        return height, columns_that_fit(o, most, config)

    @contextlib.contextmanager
    def summed_columns(self, tile: Tile | None) -> Iterator[Tensor | None]:
        """Room for the sums of a tile's columns, if a bias wants them; then adds these up."""
        # Negatives have no biases.
        if self.column_sums is None or tile is None or tile.target_starts is None:
            yield None
            return
        columns = tile.candidates.shape[0]
        sums = self.column_sums.new_empty(row_tiles(tile.rows, self.scores.config), columns)
        yield sums
        self.column_sums[tile.first_column : tile.first_column + columns].add_(sums.sum(0))

    def _times_columns(self, rows: slice, E: Tensor) -> Tensor | None:
        """E G over all blocks, if anything needs it."""
        o = self.operands
        product = o.product_of_queries(rows, alone=True)
        if product is not None:
            for block in o.blocks:
                multiply(product, E[:, block.columns], block.operand, add=block.first > 0)
        return product

    def finish_queries(self, rows: slice, product: Tensor | None, weighted: Tensor | None) -> None:
        o = self.operands
        query_gradient_epilogue(
            o.p.queries,
            o.p.candidates,
            o.scale,
            product,
            self.scores.cells,
            self.scores.state,
            o.weight_norm,
            o.prob_scale,
            rows.start,
            rows.stop - rows.start,
            offsets=o.p.targets.offsets,
            query_gradient=o.query_gradient,
            weighted_queries=weighted,
            row_negative_gradient=o.row_negative_gradient,
            scale_gradient=o.scale_gradient,
            inverse_norms=self.scores.norms.of_pair(o.blocks[0]),
        )

    def _finish_all_candidates(self, *, weighted: bool = False) -> None:
        for block in self.operands.blocks:
            columns = slice(0, block.matrix.shape[0])
            self.finish_candidates(block, columns, block.product, weighted=weighted)

    def finish_candidates(
        self, block: Block, columns: slice, product: Tensor | None, *, weighted: bool = False
    ) -> None:
        if block.gradient is None or product is None:
            return
        o = self.operands
        candidate_gradient_epilogue(
            o.p.queries,
            block.matrix,
            o.scale,
            product,
            self.scores.cells,
            o.weight_norm,
            o.prob_scale,
            columns.start,
            columns.stop - columns.start,
            by_column=self.scores.targets_by_column if block.first == 0 else None,
            candidate_gradient=block.gradient,
            weighted=weighted,
            scale_gradient=o.scale_gradient,
            inverse_norms=self.scores.norms.of_pair(block),
        )
