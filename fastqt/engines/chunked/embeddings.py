"""Embeddings as scores read them: as they are, or for cosines at norm 1, without a normalised copy."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastqt.norms import LEAST_NORM
from fastqt.problem import loss_dtype

BLOCK_BYTES = 4 * 2**20  # of the rows that are finished at a time


class Embeddings:
    """A matrix of a problem, the inverse norms of its rows, and its gradient, if one is wanted.

    Attributes:
        matrix: (rows, D)
        inverse_norms: (rows,), or None where scores are no cosines.
        gradient: (rows, D), zeros at first, in the dtype of scores, as the inverse norms.
    """

    def __init__(self, matrix: Tensor, normalize: bool, wanted: bool | None) -> None:
        self.matrix, dtype = matrix, loss_dtype(matrix)
        self.inverse_norms = inverse_norms(matrix) if normalize else None
        self.gradient = matrix.new_zeros(matrix.shape, dtype=dtype) if wanted else None

    def rows(self, rows: slice) -> Tensor:
        """Some rows as scores read them, in the dtype of scores."""
        x = self.matrix[rows].to(loss_dtype(self.matrix))
        return x if self.inverse_norms is None else x * self.inverse_norms[rows, None]

    def through_norms(self, rows: slice, gradient: Tensor) -> Tensor:
        """The gradient of some rows from that of the same rows at norm 1, in place."""
        if self.inverse_norms is not None:
            gradient.mul_(self.inverse_norms[rows, None])
            self.take_off_radial(rows, gradient)
        return gradient

    def take_off_radial(self, rows: slice, gradient: Tensor) -> None:
        """Takes off, in place, the part along the rows themselves, which a change of the norm has undone."""
        if self.inverse_norms is None:
            return
        unit = self.rows(rows)
        radial = (unit * gradient).sum(1)
        # A row that is shorter is divided by a constant.
        radial.masked_fill_(self.inverse_norms[rows] >= 1 / LEAST_NORM, 0)
        gradient.addcmul_(unit, radial[:, None], value=-1)

    def finished(self, factor: Tensor | None = None) -> Tensor | None:
        """The gradient, if one is wanted, in the dtype of the matrix.

        Args:
            factor: () what the sum of dSᵀ times the queries, times the inverse norms, lacks.
        """
        if self.gradient is None:
            return None
        if factor is not None:
            self.gradient.mul_(factor)
        if self.inverse_norms is not None:
            height = max(BLOCK_BYTES // (self.matrix.shape[1] * self.gradient.element_size()), 1)
            for rows in ranges(len(self.matrix), height):
                self.take_off_radial(rows, self.gradient[rows])
        return self.gradient.to(self.matrix.dtype)


def inverse_norms(x: Tensor) -> Tensor:
    """One over the norm of each row, as `torch.nn.functional.normalize` has it, in the dtype of scores."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=1, dtype=loss_dtype(x))
    return norms.clamp_(min=LEAST_NORM).reciprocal_()


def ranges(n: int, step: int) -> Iterator[slice]:
    """Slices of at most `step` that cover n rows."""
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))
