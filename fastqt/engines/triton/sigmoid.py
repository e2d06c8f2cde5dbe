"""The sigmoid of each cell: E is the sigmoid times its row's weight, from the scores' epilogue.

No cell depends on others, so that tiles of any shape give all gradients.
"""

from __future__ import annotations

from torch import Tensor

from fastqt.engines.triton.operands import Operands
from fastqt.engines.triton.scores import Scores
from fastqt.kernels.scores import Tile, sigmoid_scores
from fastqt.kernels.sigmoid import sigmoid_row_stats


class Sigmoid:
    """The link of `sigmoid_loss`."""

    def __init__(self, operands: Operands) -> None:
        self.operands, self.scores = operands, Scores(operands)
        self.scores.choose_shifts()
        self.row_weights = (operands.prob_scale * operands.weights / operands.weight_norm).float()
        self.scores.set_factors(operands.weight_norm / operands.prob_scale)
        operands.logsumexp.zero_(), operands.mass.zero_()

    def whole_rows(self, rows: slice, E: Tensor | None) -> None:
        """Concludes some rows, and fills E, if given, with all their columns."""
        sums, parts = self.scores.tile_row_sums(rows)
        for block, part in zip(self.operands.blocks, parts, strict=True):
            out = None if E is None else E[:, block.columns]
            self.fill(self.scores.tile(block, rows), out, part, None)
        self.conclude(rows, sums)

    def begin(self, rows: slice) -> None:
        """Nothing has to be known of rows before."""

    def fill(
        self, tile: Tile, out: Tensor | None, tile_row_sums: Tensor | None, tile_column_sums: Tensor | None
    ) -> None:
        """Fills a tile of E, and its sums: of the losses by rows, and of E by columns."""
        o = self.operands
        sigmoid_scores(
            tile,
            o.copies.queries,
            o.scale,
            self.row_weights,
            self.scores.config,
            probabilities=out,
            tile_row_sums=tile_row_sums,
            tile_column_sums=tile_column_sums,
        )

    def conclude(self, rows: slice, tile_row_sums: Tensor, product: Tensor | None = None) -> None:
        """Losses and exact cells of some rows from the sums over their other cells."""
        sigmoid_row_stats(tile_row_sums, self.scores.cells, self.scores.state, rows.start)

    def fill_weighted(self, tile: Tile, out: Tensor, tile_column_sums: Tensor | None) -> None:
        """Fills a tile of E, which holds its rows' weights."""
        self.fill(tile, out, None, tile_column_sums)
