"""What is known of a promise: score matrices of products, and what functions of them need no cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastqt.options import DiagonalMode


class Meaning:
    """What a promise stands for.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor; None for that of the first promise that it is made of.
        name: of what it is, for the report.
        comes_first: whether its value is what the program gets, and not that of the program's functions.
    """

    name = "scores"
    dtype: torch.dtype | None = None
    comes_first = False

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError  # each kind of meaning has its own

    def detached(self) -> Meaning:
        """The same, through which no gradient flows."""
        raise NotImplementedError  # each kind of meaning has its own

    def value(self) -> Tensor | None:
        """The tensor, where it follows without all cells of a score matrix."""
        return None


@dataclass(frozen=True, eq=False)
class Product:
    """scale * queries @ candidates.T + bias, of which some cells are something else.

    Attributes:
        queries: (N, D).
        candidates: (M, D).
        scale: a number or ().
        bias: of each candidate, (M,), of all, () or a number; or 0.
        mask: (N, M) bool, whose cells are -inf.
        diagonal: what the cells (i, i) are, of a square matrix.
        stands_for: what the cells of the mask are, a number whose exp is 0 beside the others in its row.
        made_of: the program's own matrices, of which queries and candidates may be copies.
    """

    queries: Tensor
    candidates: Tensor
    scale: float | Tensor = 1.0
    bias: float | Tensor = 0.0
    mask: Tensor | None = None
    diagonal: DiagonalMode = "keep"
    stands_for: float = -math.inf
    made_of: tuple[Tensor, Tensor] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether no cell is something else."""
        return self.mask is None and self.diagonal == "keep"

    def is_plain_but_diagonal(self, weights: Tensor) -> bool:
        """Whether no cell that has a weight leaves the softmax."""
        left = torch.zeros((), dtype=torch.bool, device=weights.device)
        if self.mask is not None:
            left = (weights.masked_select(self.mask) != 0).any()
        if self.diagonal == "exclude":
            left = left | (weights.diagonal() != 0).any()
        return not bool(left)

    @property
    def sources(self) -> tuple[Tensor, Tensor]:
        return (self.queries, self.candidates) if self.made_of is None else self.made_of

    @property
    def has_no_bias(self) -> bool:
        return not isinstance(self.bias, Tensor) and self.bias == 0

    def transposed(self) -> Product | None:
        """None where a bias is of each candidate."""
        if isinstance(self.bias, Tensor) and self.bias.dim():
            return None
        mask = None if self.mask is None else self.mask.T
        made_of = None if self.made_of is None else self.made_of[::-1]
        return replace(self, queries=self.candidates, candidates=self.queries, mask=mask, made_of=made_of)

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> Product:
        """The product with each of its numbers changed."""
        scale, bias = (change(x) if isinstance(x, Tensor) else x for x in (self.scale, self.bias))
        return replace(
            self, queries=change(self.queries), candidates=change(self.candidates), scale=scale, bias=bias
        )


@dataclass(frozen=True, eq=False)
class Scores(Meaning):
    """Blocks of columns beside each other, (N, M).

    Attributes:
        blocks: each a product, or numbers (N, k) that are there.
        row: (N, 1), added to all cells of a row; None for nothing.
    """

    blocks: tuple[Product | Tensor, ...]
    row: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.first.queries.shape[0], sum(map(width, self.blocks))

    @property
    def first(self) -> Product:
        return next(x for x in self.blocks if isinstance(x, Product))

    @property
    def alone(self) -> Product | None:
        """The product, if there are no other columns and nothing is added to rows."""
        block = self.blocks[0]
        return block if len(self.blocks) == 1 and isinstance(block, Product) and self.row is None else None

    def detached(self) -> Scores:
        blocks = tuple(
            x.with_tensors(Tensor.detach) if isinstance(x, Product) else x.detach() for x in self.blocks
        )
        return Scores(blocks, None if self.row is None else self.row.detach())

    def each(
        self,
        change: Callable[[Product], Product | None],
        of_numbers: Callable[[Tensor], Tensor | None] = lambda numbers: None,
    ) -> Scores | None:
        """The blocks, each changed; None where one cannot be."""
        changed = [change(x) if isinstance(x, Product) else of_numbers(x) for x in self.blocks]
        blocks = tuple(x for x in changed if x is not None)
        return replace(self, blocks=blocks) if len(blocks) == len(self.blocks) else None


@dataclass(frozen=True, eq=False)
class LogProbabilities(Meaning):
    """The log-softmax of each row of scores."""

    name = "log_softmax"
    scores: Scores

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scores.shape

    def detached(self) -> LogProbabilities:
        return LogProbabilities(self.scores.detached())


@dataclass(frozen=True, eq=False)
class Weighted(Meaning):
    """Log-probabilities times weights (N, M), which are no less than 0."""

    name = "weighted log_softmax"
    weights: Tensor
    of: LogProbabilities
    sign: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def detached(self) -> Weighted:
        return replace(self, of=self.of.detached())


@dataclass(frozen=True, eq=False)
class WeightedScores(Meaning):
    """Scores of a product, of which no cell is something else, times weights (N, M) without a gradient."""

    name = "weighted scores"
    weights: Tensor
    of: Scores

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def detached(self) -> WeightedScores:
        return replace(self, of=self.of.detached())

    def sums(self) -> Tensor:
        """Of each row, (N,): the sum over the columns goes before the product with the query."""
        p, dtype = self.of.first, torch.promote_types(self.weights.dtype, torch.float32)
        weights = self.weights.to(dtype)
        candidates = weights @ p.candidates.to(dtype)
        sums = (p.queries.to(dtype) * candidates).sum(1) * p.scale
        if isinstance(p.bias, Tensor) and p.bias.dim():
            sums = sums + weights @ p.bias.to(dtype)
        elif not p.has_no_bias:
            sums = sums + weights.sum(1) * p.bias
        return sums if self.of.row is None else sums + weights.sum(1) * self.of.row[:, 0]


@dataclass(frozen=True, eq=False)
class LogSigmoids(Meaning):
    """log sigmoid of scores times weights, each of which is 1 or -1."""

    name = "logsigmoid"
    of: WeightedScores

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def detached(self) -> LogSigmoids:
        return LogSigmoids(self.of.detached())


@dataclass(frozen=True, eq=False)
class Exponentials(Meaning):
    """exp of each score."""

    name = "exp"
    scores: Scores

    @property
    def shape(self) -> tuple[int, ...]:
        return self.scores.shape

    def detached(self) -> Exponentials:
        return Exponentials(self.scores.detached())


@dataclass(frozen=True, eq=False)
class Diagonal(Meaning):
    """A diagonal of a matrix, or another line of its cells.

    Attributes:
        length: of the line.
        cells: what computes them.
    """

    name = "diagonal"
    length: int
    cells: Callable[[], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def detached(self) -> Diagonal:
        return Diagonal(self.length, lambda: self.cells().detach())

    def value(self) -> Tensor | None:
        return self.cells()


def products(queries: Tensor, candidates: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The products of queries with a candidate each, of which each is the same number in all such lists."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return (queries[rows].to(dtype) * candidates[columns].to(dtype)).sum(-1).to(queries.dtype)


def width(block: Product | Tensor) -> int:
    return len(block.candidates) if isinstance(block, Product) else block.shape[1]


def equal(a: float | Tensor, b: float | Tensor) -> bool:
    """Whether two numbers are known to be one."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def is_number(x: Any) -> bool:
    """Whether it is one number, as Python's or in a tensor of one element that changes no shape."""
    if isinstance(x, Tensor):
        return type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 0 and x.is_floating_point()
    return isinstance(x, int | float) and not isinstance(x, bool)
