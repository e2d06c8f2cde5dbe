"""What the three products read of embeddings of 16 bits, so that each adds up in float32.

The scores are products of the embeddings as they are. E is rounded once, row by row times a number that makes
it the gradient of a loss of weight 1, which float16 has the range for. What else gradients are made of,
weights, scale and inverse norms, multiplies their float32 sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines.chunked.embeddings import Embeddings
from fastqt.engines.products import multiply

ROUNDED = (torch.float16, torch.bfloat16)
# float16 holds this many times what is at most 1, and what is smaller keeps its digits down to 4e-9.
FLOAT16_SPREAD = 2.0**15
LEAST = 1e-30  # that float32 can be divided by


def rounded_bytes(queries: Tensor, width: int) -> int:
    """What a row of E takes once more where it is rounded."""
    return width * queries.element_size() if queries.dtype in ROUNDED else 0


def score(
    cells: Tensor, rows: slice, scaled: Tensor, queries: Embeddings, block: Embeddings, scale: float | Tensor
) -> None:
    """Writes the scores of some queries and a block of columns, (n, columns).

    Args:
        scaled: the queries as scores read them, times the scale.
    """
    if queries.matrix.dtype in ROUNDED:
        multiply(cells, queries.matrix[rows], block.matrix.T, add=False)
        norms = queries.inverse_norms
        cells.mul_(scale if norms is None else (norms[rows] * scale)[:, None])
    else:
        torch.mm(scaled, block.matrix.T, out=cells)
    if block.inverse_norms is not None:
        cells.mul_(block.inverse_norms)


class Rounded:
    """The operands of the products of all chunks.

    Args:
        queries: whose rows the chunks are of.
        scale: of the scores.
        largest: () no dL/dS of a loss of weight 1 is larger.
        weights: (N,) of the rows' losses, or None where dL/dS is at most `largest` with the weights in it.
        cells: how many a chunk has at most.

    Attributes:
        of_columns: () what the sum of the chunks' products is to be multiplied by.
    """

    def __init__(
        self,
        queries: Embeddings,
        scale: float | Tensor,
        largest: Tensor,
        weights: Tensor | None,
        cells: int,
    ) -> None:
        dtype = queries.matrix.dtype
        spread = FLOAT16_SPREAD if dtype is torch.float16 else 1.0
        self._queries, self._weights = queries, weights
        # Where nothing has a gradient, any number will do.
        self._spread = spread / largest.masked_fill(largest == 0, 1).clamp(min=LEAST)
        self._room = queries.matrix.new_empty(cells)
        self._weight_norm = torch.ones_like(largest)
        if weights is not None:
            # The largest weighted query as large as E, so that small ones have all digits of float16.
            size = queries.matrix.abs().amax().to(weights.dtype).clamp(min=LEAST) / spread
            self._weight_norm = weights.abs().amax().clamp(min=LEAST) * size
        self.of_columns = self._weight_norm / self._spread * scale

    def of_chunk(self, rows: slice, E: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the products of a chunk read in place of E and of the weighted queries.

        Args:
            rows: of the chunk.
            E, factors: (n, width) and (n,), of which dL/dS is factor_i E_ij.

        Returns:
            E in 16 bits, the queries in 16 bits, and (n,) what the first product's rows lack.
        """
        f, norms, spread = self._queries.matrix[rows], self._queries.inverse_norms, self._spread
        missing = torch.ones_like(factors) / spread
        if self._weights is not None:
            weights = self._weights[rows]
            # A row of weight 0 has a factor of 0, whatever it is divided by.
            factors = factors / weights.masked_fill(weights == 0, 1)
            missing = missing * weights
            f = (f * (weights / self._weight_norm)[:, None]).to(f.dtype)
        factors = factors * spread
        if norms is not None:
            factors, missing = factors * norms[rows], missing / norms[rows]

        room = self._room[: E.numel()].view_as(E)
        return torch.mul(E, factors.to(E.dtype)[:, None], out=room), f, missing.to(E.dtype)
