"""What is known of a promise: score matrices of products, and what functions of them need no cells."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fastqt.options import DiagonalMode


class Term(Protocol):
    """A tensor that can be computed."""

    def computed(self) -> Tensor: ...

    def detached(self) -> Term: ...


class Promised(Protocol):
    """A tensor that can be computed; see `State`."""

    @property
    def is_there(self) -> bool:
        """Whether it, or what it is made of, has been computed."""

    def computed(self) -> Tensor: ...

    def detached(self) -> Promised: ...


T = TypeVar("T")


def replace(x: T, **changes: Any) -> T:
    """A record with other values of some fields; `dataclasses.replace` takes ten times as long."""
    changed = object.__new__(type(x))
    changed.__dict__.update(x.__dict__, **changes)
    return changed


class Meaning:
    """What a promise stands for.

    Attributes:
        shape: of the tensor.
        dtype: of the tensor; None for that of the first promise that it is made of.
        name: of what it is, for the report.
        comes_first: whether its value is what the program gets, and not that of the program's functions.
        is_matrix: whether it is of the cells of a score matrix.
        waits: whether its promise becomes the tensor when anything is asked of it that no rule knows.
        by: of what comes first, the call of fastqt that computes it.
    """

    name = "scores"
    dtype: torch.dtype | None = None
    comes_first = False
    is_matrix = True
    waits = False
    by = ""

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError  # each kind of meaning has its own

    def detached(self) -> Meaning:
        """The same, through which no gradient flows."""
        raise NotImplementedError  # each kind of meaning has its own

    def value(self) -> Tensor | None:
        """The tensor, where it follows without all cells of a score matrix."""
        return None


@dataclass(eq=False)  # Not frozen: making a frozen instance takes three times as long.
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
        unit: queries and candidates at norm 1, of which the product is then; None for that of what they are.
    """

    queries: Tensor
    candidates: Tensor
    scale: float | Tensor = 1.0
    bias: float | Tensor = 0.0
    mask: Tensor | None = None
    diagonal: DiagonalMode = "keep"
    stands_for: float = -math.inf
    made_of: tuple[Tensor, Tensor] | None = None
    unit: tuple[Promised, Promised] | None = None

    @property
    def is_cosine(self) -> bool:
        """Whether the rows are brought to norm 1 by whoever computes the product."""
        return self.unit is not None

    def of_rows(self) -> Product:
        """The same as a product of rows that are there."""
        if self.unit is None:
            return self
        queries, candidates = (x.computed() for x in self.unit)
        return replace(self, queries=queries, candidates=candidates, unit=None, made_of=None)

    def for_loss(self) -> Product:
        """The same as a loss is to have it: of cosines where nobody has asked for the rows of norm 1."""
        is_there = self.unit is not None and any(x.is_there for x in self.unit)
        return self.of_rows() if is_there else self

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

    def is_same(self, other: Product | Tensor) -> bool:
        """Whether the cells are known to be those of another product, but for what leaves a softmax."""
        if isinstance(other, Tensor) or not equal(self.bias, other.bias):
            return False
        if not equal(self.scale, other.scale):
            return False
        units = self.unit is other.unit
        if self.unit is not None and other.unit is not None:
            units = all(x is y for x, y in zip(self.unit, other.unit, strict=True))
        return units and self.queries is other.queries and self.candidates is other.candidates

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
        unit = None if self.unit is None else self.unit[::-1]
        turned = {"queries": self.candidates, "candidates": self.queries, "mask": mask}
        return replace(self, **turned, made_of=made_of, unit=unit)

    def detached(self) -> Product:
        """The same, through which no gradient flows."""
        scale, bias = (x.detach() if isinstance(x, Tensor) else x for x in (self.scale, self.bias))
        queries, candidates = self.queries.detach(), self.candidates.detach()
        unit = None if self.unit is None else (self.unit[0].detached(), self.unit[1].detached())
        return replace(self, queries=queries, candidates=candidates, scale=scale, bias=bias, unit=unit)


@dataclass(eq=False)
class RowTerms:
    """A sum of terms, (N, 1) each, of which some are promises.

    Attributes:
        terms: each with its sign.
    """

    terms: tuple[tuple[float, Tensor | Term], ...]

    def plus(self, sign: float, term: Tensor | Term) -> RowTerms:
        """With another term, which cancels the same one of the other sign."""
        for i, (other_sign, other) in enumerate(self.terms):
            if other is term and other_sign == -sign and not isinstance(term, Tensor):
                return RowTerms(self.terms[:i] + self.terms[i + 1 :])
        return RowTerms((*self.terms, (sign, term)))

    @property
    def tensors(self) -> list[Tensor]:
        """The terms that are no promises."""
        return [x for _, x in self.terms if isinstance(x, Tensor)]

    def detached(self) -> RowTerms:
        return RowTerms(
            tuple((sign, x.detach() if isinstance(x, Tensor) else x.detached()) for sign, x in self.terms)
        )

    def computed(self) -> Tensor:
        """The sum, (N, 1)."""
        total: Tensor | None = None
        for sign, x in self.terms:
            term = sign * (x if isinstance(x, Tensor) else x.computed())
            total = term if total is None else total + term
        assert total is not None
        return total


@dataclass(eq=False)
class Scores(Meaning):
    """Blocks of columns beside each other, (N, M).

    Attributes:
        blocks: each a product, or numbers (N, k) that are there.
        row: added to all cells of a row; None for nothing.
    """

    blocks: tuple[Product | Tensor, ...]
    row: RowTerms | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        columns = 0
        for x in self.blocks:
            columns += x.candidates.shape[0] if isinstance(x, Product) else x.shape[1]
        return self.first.queries.shape[0], columns

    @property
    def first(self) -> Product:
        for x in self.blocks:
            if isinstance(x, Product):
                return x
        raise AssertionError("scores without a product")

    @property
    def alone(self) -> Product | None:
        """The product, if there are no other columns and nothing is added to rows."""
        block = self.blocks[0]
        return block if len(self.blocks) == 1 and isinstance(block, Product) and self.row is None else None

    @property
    def takes_rows(self) -> bool:
        """Whether something can be added to all cells of a row."""
        products = [x for x in self.blocks if isinstance(x, Product)]
        return all(p.diagonal != "zero" and p.stands_for == -math.inf for p in products)

    def detached(self) -> Scores:
        blocks = tuple(x.detached() if isinstance(x, Product) else x.detach() for x in self.blocks)
        return Scores(blocks, None if self.row is None else self.row.detached())

    def plus(self, sign: float, term: Tensor | Term) -> Scores:
        """With a term that is added to all cells of a row, (N, 1), or taken off."""
        row = (RowTerms(()) if self.row is None else self.row).plus(sign, term)
        return replace(self, row=row if row.terms else None)

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
    weights: Any  # a tensor or a `Pattern`
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
    weights: Any  # a tensor or a `Pattern`
    of: Scores

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def detached(self) -> WeightedScores:
        return replace(self, of=self.of.detached())


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
    is_matrix = False
    length: int
    cells: Callable[[], Tensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    def detached(self) -> Diagonal:
        return Diagonal(self.length, lambda: self.cells().detach())

    def value(self) -> Tensor | None:
        return self.cells()


@dataclass(eq=False)
class UnitRows(Meaning):
    """Rows that a program brings to norm 1, times a number.

    Attributes:
        of: (N, D) the rows.
        source: the program's own tensor of them.
        factor: the number.
        unit: the rows at norm 1, without the factor; None for those of the promise itself.
        turned: whether it is the transposed matrix, (D, N).
    """

    name = "rows of norm 1"
    is_matrix = False
    waits = True
    of: Tensor
    source: Tensor
    factor: float | Tensor = 1.0
    unit: Promised | None = None
    turned: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.of.shape)
        return shape[::-1] if self.turned else shape

    def detached(self) -> UnitRows:
        factor = self.factor.detach() if isinstance(self.factor, Tensor) else self.factor
        unit = None if self.unit is None else self.unit.detached()
        return replace(self, of=self.of.detach(), factor=factor, unit=unit)


def products(queries: Tensor, candidates: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The products of queries with a candidate each, of which each is the same number in all such lists."""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    return (queries[rows].to(dtype) * candidates[columns].to(dtype)).sum(-1).to(queries.dtype)


def width(block: Product | Tensor) -> int:
    return block.candidates.shape[0] if isinstance(block, Product) else block.shape[1]


def equal(a: float | Tensor, b: float | Tensor) -> bool:
    """Whether two numbers are known to be one."""
    return a is b or (not isinstance(a, Tensor) and not isinstance(b, Tensor) and a == b)


def is_number(x: Any) -> bool:
    """Whether it is one number, as Python's or in a tensor of one element that changes no shape."""
    if isinstance(x, Tensor):
        return type(x) in (Tensor, torch.nn.Parameter) and x.dim() == 0 and x.is_floating_point()
    return isinstance(x, int | float) and not isinstance(x, bool)
