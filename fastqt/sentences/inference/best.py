"""Exact search: the best of a stream of scores."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

ROWS = 8192  # that queries are compared with at a time

Hits = tuple[NDArray[np.float32], NDArray[np.int64]]  # cosines and rows, (Q, k)


def highest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k highest scores of each row (Q, n) and their columns, (Q, min(k, n)), best first.

    Among equal scores, the first columns come first.
    """
    if k < scores.shape[1]:
        best, columns = scores.topk(k, dim=1)
        # topk takes any of several equal scores. That is no matter where none of them is left over.
        if bool(((scores >= best[:, -1:]).sum(dim=1) == k).all()):
            columns = columns.sort(dim=1).values
            best, order = scores.gather(1, columns).sort(dim=1, descending=True, stable=True)
            return best, columns.gather(1, order)
    best, columns = scores.sort(dim=1, descending=True, stable=True)
    return best[:, :k], columns[:, :k]


class Best:
    """The k highest scores of each of Q queries among those that were added so far.

    `scores`, (Q, m), are best first, with m = k as soon as there are so many, and `rows`, (Q, m) int64, say
    where they are. Among equal scores, earlier rows come first.
    """

    def __init__(self, queries: int, k: int) -> None:
        self.k = k
        self.scores = torch.empty(queries, 0, device="cpu")
        self.rows = torch.empty(queries, 0, dtype=torch.int64, device="cpu")

    def add(self, scores: Tensor, first: int) -> None:
        """Adds the scores (Q, n) of rows first, first + 1, ..., which come after all rows before."""
        rows = torch.arange(first, first + scores.shape[1], device="cpu").expand_as(scores)
        self.scores, columns = highest(torch.cat([self.scores, scores], dim=1), self.k)
        self.rows = torch.cat([self.rows, rows], dim=1).gather(1, columns)

    def results(self) -> Hits:
        """Scores and rows, (Q, m) each."""
        return self.scores.numpy(), self.rows.numpy()


def best_products(queries: Tensor, parts: Iterable[Tensor], k: int) -> Best:
    """The k highest inner products of queries (Q, D) with the rows of parts (n, D), which follow each other.

    They are cosines where all vectors have norm 1.
    """
    best, first = Best(len(queries), k), 0
    for part in parts:
        best.add(queries @ part.T, first)
        first += len(part)
    return best


def unit_rows(vectors: NDArray[Any]) -> Tensor:
    """Vectors (n, D) as float32 at norm 1."""
    return F.normalize(torch.from_numpy(np.array(vectors, dtype=np.float32)), dim=1)


def blocks(rows: int, size: int | None = None) -> Iterable[slice]:
    """The rows 0 … rows − 1 in parts of `size`, or of ROWS."""
    size = size or ROWS
    return (slice(begin, begin + size) for begin in range(0, rows, size))


class Flat:
    """Compares a query with each of the vectors (n, D)."""

    most_effort = 1

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors = vectors

    def search(self, queries: NDArray[np.float32], k: int, effort: int) -> Hits:
        # The parts are copied: in a file the vectors are not aligned.
        parts = (torch.from_numpy(np.array(self.vectors[part])) for part in blocks(len(self.vectors)))
        return best_products(torch.from_numpy(queries), parts, k).results()
