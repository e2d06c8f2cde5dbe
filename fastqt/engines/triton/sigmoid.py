"""The fused walk for sigmoids, whose cells know of no others: three products in tiles of any shape.

E is the sigmoid itself, times what its row's loss counts, from the epilogue of the scores'
product. dF adds up over a chunk's columns and dG over chunks of rows, both in float32. Where the room
does not hold dG's sums, as where the gradients are of 16 bits and memory="low", dF and dG take a walk each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastqt.engines.triton.softmax import FusedWalk
from fastqt.engines.triton.walk import ROW_MULTIPLE, even, multiply, ranges
from fastqt.kernels.scores import Tile, column_tiles, sigmoid_scores
from fastqt.kernels.sigmoid import sigmoid_row_stats


class SigmoidWalk(FusedWalk):
    """Scores with the sigmoid in their product's epilogue; targets one by one."""

    def prepare(self) -> None:
        self.look_at_rows()
        self.row_weights = (self.prob_scale * self.weights / self.weight_norm).float()
        self.state.factors.copy_(self.weight_norm / self.prob_scale)
        self.logsumexp.zero_(), self.mass.zero_()

    @property
    def fits_in_one_walk(self) -> bool:
        return self.p.memory == "fast" or self.product_bytes <= self.room // 2

    def weights_in_columns(self) -> Tensor:
        return self.row_weights

    def sum_rows(self, rows: slice, E: Tensor | None = None) -> None:
        tile_row_sums, parts = self._parts_of_blocks(rows)
        for block, part in zip(self.blocks, parts, strict=True):
            self.fill(self.tile(block, rows), None if E is None else E[:, block.columns], tile_row_sums=part)
        self.conclude(rows, tile_row_sums)

    def conclude(self, rows: slice, tile_row_sums: Tensor) -> None:
        """Losses and exact cells of some rows from the sums over their other cells."""
        sigmoid_row_stats(tile_row_sums, self.cells, self.state, rows.start)

    def fill(
        self,
        tile: Tile,
        out: Tensor | None,
        *,
        tile_row_sums: Tensor | None = None,
        factors: Tensor | None = None,
        tile_column_sums: Tensor | None = None,
        shift_overflowed: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        sigmoid_scores(
            *(tile, self.p.queries, self.scale, self.row_weights, self.config),
            probabilities=out,
            tile_row_sums=tile_row_sums,
            tile_column_sums=tile_column_sums,
        )

    def all_at_once(self) -> None:
        """All gradients from one walk over tiles."""
        queries = self.p.queries
        height, length = self._tile()
        E = queries.new_empty(height, length)
        self.make_products()
        for rows in ranges(self.N, height):
            n = rows.stop - rows.start
            tile_row_sums, parts = self._parts_of_blocks(rows)
            product = None
            if self.needs.queries or self.needs.scale:
                product = queries.new_empty(n, self.D, dtype=torch.float32)
            for block, part in zip(self.blocks, parts, strict=True):
                for columns in ranges(block.matrix.shape[0], length):
                    cells = E[:n, : columns.stop - columns.start]
                    tile = self.tile(block, rows, columns)
                    begin, end = (column_tiles(at, self.config) for at in (columns.start, columns.stop))
                    with self._column_sums(tile) as tile_column_sums:
                        self.fill(
                            tile, cells, tile_row_sums=part[begin:end], tile_column_sums=tile_column_sums
                        )
                    if product is not None:
                        first = block.first == 0 and columns.start == 0
                        multiply(product, cells, block.matrix[columns], add=not first)
                    if block.product is not None:
                        multiply(block.product[columns], cells.T, queries[rows], add=rows.start > 0)
            self.conclude(rows, tile_row_sums)
            self._finish_queries(rows, product, None)
        for block in self.blocks:
            self._finish_candidates(block, slice(0, block.matrix.shape[0]), block.product)

    def _tile(self) -> tuple[int, int]:
        """Rows and columns of tiles, near squares: their products read and add to the least."""
        itemsize, room = self.p.queries.element_size(), self.room_beside_products
        widest = max(block.matrix.shape[0] for block in self.blocks)
        row_bytes = 4 * (self.D + column_tiles(self.width, self.config))  # of dF, of partial sums
        half = row_bytes / itemsize / 2
        rows = max(min(self.N, int(math.sqrt(half * half + room / itemsize) - half)), 1)
        multiple = 2 * self.config.columns
        length = even(widest, max(int(room / rows - row_bytes) // itemsize, 1), multiple)
        return even(self.N, self.fitting_rows(itemsize * length + row_bytes), ROW_MULTIPLE), length
