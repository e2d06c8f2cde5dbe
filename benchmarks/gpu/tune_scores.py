"""The launches of the scores' kernel that `benchmarks.tune` times, one or two for each epilogue."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.peers import Inputs, Shape, make_inputs

# fastqt.kernels is imported within functions, because its import fixes whether Triton interprets.
if TYPE_CHECKING:
    from fastqt.kernels.launch import Config
    from fastqt.kernels.scores import Tile

TOLERANCE = 1e-3  # relative error of row sums against float32; a config beyond it is dropped as wrong
STORED_TOLERANCE = 2**-7  # likewise of what is stored, in bfloat16 for one
CHECKED_ROWS = 256  # the first ones, and as many last ones

Sums = tuple[Tensor, Tensor]  # by tiles: of rows (column_tiles, N), and of columns (row_tiles, M)


class Scores:
    """The scores' kernel as the engine launches it, with one of the epilogues.

    Attributes:
        stored: (N, M), what the last launch has stored of each cell.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: torch.device, epilogue: str = "plain"
    ) -> None:
        self.shape, self.epilogue = shape, EPILOGUES[epilogue]
        self.inputs: Inputs = make_inputs(shape, dtype, device)
        self.scale = torch.ones((), device=device)

        # Of rows and of columns: shifts, factors, and inverse norms, which need not be those of the inputs.
        self.zeros, self.ones, self.halves = (
            tuple(torch.full((n,), value, device=device) for n in (shape.N, shape.M))
            for value in (0.0, 1.0, 0.5)
        )

        self.starts = torch.arange(shape.N + 1, device=device)
        self.columns = self.inputs.labels.int()
        self.stored = torch.empty(shape.N, shape.M, dtype=dtype, device=device)

    def launch(self, config: Config, i: int) -> Tensor:
        """The row sums of the i-th set of inputs, for each tile of columns."""
        from fastqt.kernels.scores import column_tiles, row_tiles

        N, M = self.shape.N, self.shape.M
        row_sums = self.scale.new_empty(column_tiles(M, config), N)
        column_sums = self.scale.new_empty(row_tiles(N, config), M)
        self.epilogue.launch(self, config, i, (row_sums, column_sums))
        return row_sums

    def pair(self, i: int) -> tuple[Tensor, Tensor]:
        """The i-th queries and candidates."""
        f, g = (x.detach() for x in self.inputs[i])
        return f, g

    def with_targets(self, candidates: Tensor, bias: Tensor | None = None) -> Tile:
        """All scores but the diagonal and one target of each row."""
        from fastqt.kernels.scores import Tile

        listed = self.starts, self.inputs.labels, self.columns, self.columns
        return Tile(0, self.shape.N, candidates, 0, True, *listed, bias=bias)

    def with_pairs(self, candidates: Tensor, inverse_norms: Sums | tuple[None, None] = (None, None)) -> Tile:
        """All scores but the diagonal."""
        from fastqt.kernels.scores import Tile

        norms = dict(zip(("query_inverse_norms", "candidate_inverse_norms"), inverse_norms, strict=True))
        return Tile(0, self.shape.N, candidates, exclude_diagonal=True, **norms)

    def is_right(self, config: Config) -> bool:
        """Whether the first and the last rows of what is stored, and their sums, equal plain PyTorch's."""
        f, g = (x.float() for x in self.pair(0))
        every = torch.arange(self.shape.N, device=f.device)
        row = torch.cat([every[:CHECKED_ROWS], every[CHECKED_ROWS:][-CHECKED_ROWS:]])
        column = torch.arange(self.shape.M, device=f.device)

        excluded = row[:, None] == column
        if self.epilogue.has_targets:
            excluded |= self.inputs.labels[row][:, None] == column
        summed, cells = (x.masked_fill(excluded, 0) for x in self.epilogue.wanted(f[row] @ g.T))

        self.stored.fill_(math.nan)
        sums, wanted = self.launch(config, 0).sum(0)[row], summed.sum(1)
        of_sums = (sums - wanted).abs() <= TOLERANCE * wanted
        of_cells = (self.stored[row].float() - cells).abs() <= STORED_TOLERANCE * cells
        return bool(of_sums.all()) and bool(of_cells.all())


class Epilogue(NamedTuple):
    """What `Scores` launches for the name of an epilogue in a table."""

    launch: Callable[[Scores, Config, int, Sums], None]  # with the number of the inputs
    wanted: Callable[[Tensor], tuple[Tensor, Tensor]]  # of scores: what is summed up, and what is stored
    has_targets: bool  # whether one target of each row is left out


def _exponentials(s: Scores, config: Config, i: int, sums: Sums) -> None:
    """E and its sums, of a softmax."""
    from fastqt.kernels.scores import exp_scores

    f, g = s.pair(i)
    shift, (row_sums, _) = s.zeros[0], sums
    exp_scores(s.with_targets(g), f, s.scale, shift, config, exponentials=s.stored, tile_row_sums=row_sums)


def _sigmoids(s: Scores, config: Config, i: int, sums: Sums) -> None:
    """Sigmoids of scores with biases, and the sums of rows and of columns."""
    from fastqt.kernels.scores import sigmoid_scores

    f, g = s.pair(i)
    sigmoid_scores(
        s.with_targets(g, s.ones[1]),
        f,
        s.scale,
        s.ones[0],
        config,
        probabilities=s.stored,
        tile_row_sums=sums[0],
        tile_column_sums=sums[1],
    )


def _both_ways(s: Scores, config: Config, i: int, sums: Sums) -> None:
    """CLIP's two launches: the sums of rows and columns, and then both probabilities of each cell."""
    f, g = s.pair(i)
    _launch_both(s, s.with_pairs(g), f, config, sums)


def _cosines_both_ways(s: Scores, config: Config, i: int, sums: Sums) -> None:
    """The same of cosines."""
    f, g = s.pair(i)
    _launch_both(s, s.with_pairs(g, s.halves), f, config, sums)


def _launch_both(s: Scores, tile: Tile, queries: Tensor, config: Config, sums: Sums) -> None:
    from fastqt.kernels.scores import row_and_column_scores

    asked = tile, queries, s.scale, s.zeros, config
    row_and_column_scores(*asked, tile_row_sums=sums[0], tile_column_sums=sums[1])
    row_and_column_scores(*asked, factors=s.ones, total=s.stored)


# Of all launches that a table calls by the same name, those that take the most registers.
EPILOGUES = {
    "plain": Epilogue(_exponentials, lambda S: (S.exp(), S.exp()), True),
    "few_columns": Epilogue(_both_ways, lambda S: (S.exp(), 2 * S.exp()), False),
    "heavy": Epilogue(_sigmoids, lambda S: (F.softplus(S + 1), (S + 1).sigmoid()), True),
    # What is stored is multiplied by both inverse norms.
    "wide": Epilogue(_cosines_both_ways, lambda S: ((S / 4).exp(), (S / 4).exp() / 2), False),
}
