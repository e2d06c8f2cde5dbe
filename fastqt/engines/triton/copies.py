"""The embeddings as matrix products read them: as they are given, or in copies that products are fast with.

A copy's rows begin at multiples of 16 bytes, and are as long as a multiple of these. Kernels load 16 bytes at
a time then, where they would load single elements; and the vendor's products use tensor cores. It has zeros
beyond the given width, and so has what is multiplied with it.

Tensor cores cut float32 operands off to TF32. Copies are rounded to it, which takes a pass over the
embeddings. A problem without copies has its tiles rounded in registers instead, each time they are read.

What is computed one by one, as exact cells and norms are, is computed from the embeddings as they are given.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastqt.kernels.copies import copy_rows, is_aligned, unit_of
from fastqt.kernels.launch import precision
from fastqt.problem import Problem

LEAST_CELLS = 2**21  # of the scores, for which a pass over the embeddings takes less time than it saves


class Copies(NamedTuple):
    """The operands of products, of one width."""

    queries: Tensor  # (N, width)
    candidates: Tensor  # (M, width)
    negatives: Tensor | None  # (K, width)
    rounded: bool = False  # whether to TF32
    bytes: int = 0  # of what is copied

    @classmethod
    def of(cls, p: Problem, room: int, *, rounds: bool = True) -> Copies:
        """Those of a problem, which take at most half of the room; the embeddings themselves if they would.

        Args:
            p: the problem.
            room: bytes that its computation may take.
            rounds: whether kernels of this library multiply, and not the vendor's, which round by themselves.
        """
        untouched = cls(p.queries, p.candidates, p.negatives)
        if len(p.queries) * len(p.candidates) < LEAST_CELLS:
            return untouched

        rounded = rounds and precision(p.queries.dtype) == "tf32"
        matrices = [x for x in untouched[:3] if x is not None]
        to_copy = [rounded or not is_aligned(x) for x in matrices]

        unit, D = unit_of(p.queries), p.queries.shape[1]
        width = -(-D // unit) * unit
        rows = sum(len(x) for x, copied in zip(matrices, to_copy, strict=True) if copied)
        size = rows * width * p.queries.element_size()
        if size == 0 or size > room // 2:
            return untouched

        queries, candidates, *negatives = (
            copy_rows(x, width, rounded=rounded) if copied else x
            for x, copied in zip(matrices, to_copy, strict=True)
        )
        return cls(queries, candidates, negatives[0] if negatives else None, rounded, size)

    @property
    def width(self) -> int:
        return self.queries.shape[1]

    def transposed(self) -> Copies:
        """Those of the problem in which queries are candidates, and candidates queries."""
        return self._replace(queries=self.candidates, candidates=self.queries)
