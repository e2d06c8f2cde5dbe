"""The matrix product that makes scores, and what its epilogue turns each tile of them into.

`mainloop` holds the kernel: it walks over tiles and makes the scores of each in registers. `exclusions` adds
biases and removes cells, `epilogues` reduces and stores the tile, `launch` is what engines call,
with a `tile`. `kept` makes CLIP's epilogue of scores that were stored.
"""

from fastqt.kernels.scores.kept import KEPT, kept_row_and_column_scores
from fastqt.kernels.scores.launch import exp_scores, max_scores, row_and_column_scores, sigmoid_scores
from fastqt.kernels.scores.tile import Tile, column_tiles, row_tiles

__all__ = [
    "KEPT",
    "Tile",
    "column_tiles",
    "exp_scores",
    "kept_row_and_column_scores",
    "max_scores",
    "row_and_column_scores",
    "row_tiles",
    "sigmoid_scores",
]
