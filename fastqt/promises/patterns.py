"""Matrices that follow from which integers of rows and of columns are equal: masks, labels, targets.

`torch.eye(n)` is true where the number of the row is that of the column, `labels[:, None] == labels` where
the labels are equal. A cell of what a program makes of several such matrices, function by function, depends
on which of these equalities hold. A table with a number for each case stands for the whole matrix.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.promises.scores import Meaning


@dataclass(eq=False)
class Equality:
    """Which cells have the same integer of their row and of their column.

    Attributes:
        rows: (N,) int64, that nobody changes, as the columns.
        columns: (M,) int64.
        is_diagonal: whether both are 0, 1, 2, ...
    """

    rows: Tensor
    columns: Tensor
    is_diagonal: bool = False

    @functools.cached_property
    def in_order(self) -> tuple[Tensor, Tensor, Tensor]:
        """The columns in the order of their integers, where those of a row begin, and how many there are."""
        order = self.columns.argsort(stable=True)
        integers = self.columns[order]
        begins = torch.searchsorted(integers, self.rows)
        return order, begins, torch.searchsorted(integers, self.rows, right=True) - begins

    def is_same(self, other: Equality) -> bool:
        if self is other:
            return True
        if self.is_diagonal and other.is_diagonal:
            return True
        pairs = (self.rows, other.rows), (self.columns, other.columns)
        return all(x is y or (x.device == y.device and torch.equal(x, y)) for x, y in pairs)

    def turned(self) -> Equality:
        return Equality(self.columns, self.rows, self.is_diagonal)


@dataclass(eq=False)
class Pattern(Meaning):
    """A matrix of integers that are equal.

    Attributes:
        size: (N, M).
        equalities: each between one of N rows and one of M columns.
        table: on the CPU, with a dimension of 2 for each equality: what a cell is where it does not hold, and
            where it does; (1,) without equalities.
        device: of the matrix.
    """

    name = "mask"
    is_matrix = False
    waits = True
    size: tuple[int, int]
    equalities: tuple[Equality, ...]
    table: Tensor
    device: torch.device

    def __post_init__(self) -> None:
        self.dtype = self.table.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.size

    def detached(self) -> Pattern:
        return self

    def turned(self) -> Pattern:
        equalities = tuple(x.turned() for x in self.equalities)
        return Pattern(self.size[::-1], equalities, self.table, self.device)

    def with_table(self, table: Tensor) -> Pattern:
        return Pattern(self.size, self.equalities, table, self.device)

    def tables_of(self, equalities: Sequence[Equality]) -> Tensor:
        """The table by these equalities, among which its own are."""
        if len(equalities) == len(self.equalities) and all(map(operator.is_, equalities, self.equalities)):
            return self.table
        places = [next(i for i, y in enumerate(equalities) if x.is_same(y)) for x in self.equalities]
        if not equalities:
            return self.table
        if not places:
            return self.table.expand((2,) * len(equalities))
        order = sorted(range(len(places)), key=places.__getitem__)
        shape = [2 if i in places else 1 for i in range(len(equalities))]
        return self.table.permute(order).reshape(shape).expand((2,) * len(equalities))

    @functools.cached_property
    def values(self) -> list[float]:
        """What a cell may be."""
        values: list[float] = self.table.flatten().tolist()
        return values

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, self.values))

    @functools.cached_property
    def simple(self) -> Pattern:
        """The same matrix by the equalities alone on which it depends."""
        equalities, table, values = list(self.equalities), self.table, self.values
        for i in reversed(range(len(equalities))):
            without, with_it = _halves(values, len(equalities), i)
            if without == with_it:
                table, values = table.select(i, 0), without
                del equalities[i]
        if len(equalities) == len(self.equalities):
            return self
        table = table if equalities else table.reshape(1)
        return Pattern(self.size, tuple(equalities), table, self.device)

    @property
    def is_zero_on_diagonal(self) -> bool:
        """Whether its equalities alone say that the cells (i, i) are 0."""
        count = len(self.equalities)
        of_diagonal = [i for i, x in enumerate(self.equalities) if x.is_diagonal]
        return any(not any(_halves(self.values, count, i)[1]) for i in of_diagonal)

    def is_of_diagonal(self, elsewhere: float, on_it: float) -> bool:
        """Whether the cells (i, i) are one number and all others another one."""
        p = self.simple
        is_square = self.size[0] == self.size[1] and len(p.equalities) == 1
        return is_square and p.equalities[0].is_diagonal and p.values == [elsewhere, on_it]

    @property
    def background(self) -> float:
        """What a cell is in which nothing is equal."""
        return self.values[0]

    def cells(self) -> Tensor:
        """The matrix."""
        return self._of([(x.rows[:, None], x.columns) for x in self.equalities], self.size)

    def of_rows(self, first: int, last: int) -> Tensor:
        ids = [(x.rows[first:last, None], x.columns) for x in self.equalities]
        return self._of(ids, (last - first, self.size[1]))

    def of_columns(self, first: int, last: int) -> Tensor:
        ids = [(x.rows[:, None], x.columns[first:last]) for x in self.equalities]
        return self._of(ids, (self.size[0], last - first))

    def of_cells(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The cells (rows[i], columns[i])."""
        ids = [
            (rows, columns) if x.is_diagonal else (x.rows[rows], x.columns[columns]) for x in self.equalities
        ]
        return self._of(ids, tuple(rows.shape))

    def _of(self, ids: list[tuple[Tensor, Tensor]], size: tuple[int, ...]) -> Tensor:
        table = self.table.to(self.device)
        if not ids:
            return table.expand(size).clone()
        if len(ids) == 1 and self.dtype == torch.bool and self.values == [False, True]:
            return ids[0][0] == ids[0][1]
        return _chosen(table, ids)

    def times(self, x: Tensor) -> Tensor:
        """The product with a matrix (M, D), (N, D), by the sums of its rows that have equal integers."""
        return self._times(x, _sums)

    def _times(self, x: Tensor, sums_of: Callable[[list[Equality], Tensor], Tensor]) -> Tensor:
        count, coefficients = len(self.equalities), list(map(float, self.values))
        for bit in (1 << i for i in range(count)):
            # What a cell has more where this equality holds, beside the others that do.
            coefficients = [
                c - coefficients[place - bit] if place & bit else c for place, c in enumerate(coefficients)
            ]
        total = x.new_zeros(())
        for place, coefficient in enumerate(coefficients):
            if coefficient:
                held = [self.equalities[i] for i in range(count) if place >> (count - 1 - i) & 1]
                sums = sums_of(held, x)
                total = total + (sums if coefficient == 1 else coefficient * sums)
        return total.expand(self.size[0], x.shape[1])

    def sums(self) -> Tensor:
        """Of each row, (N,), in the dtype of accumulation."""
        ones = torch.ones(self.size[1], 1, dtype=accumulation_dtype(self.device), device=self.device)
        return self._times(ones, _counts)[:, 0]

    def entries(self, most: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Rows, columns and numbers of the cells that are not 0, by row and then by column.

        None where there may be more than `most`.
        """
        p, count = self.simple, len(self.simple.equalities)
        if p.background != 0:
            return None
        for i, x in enumerate(p.equalities):
            if not any(_halves(p.values, count, i)[0]):  # All of them are cells where this equality holds.
                cells, table = _equal_cells(x, most), p.table.select(i, 1)
                others = p.equalities[:i] + p.equalities[i + 1 :]
                rest = Pattern(p.size, others, table if others else table.reshape(1), p.device)
                return None if cells is None else rest.not_zero(*cells)

        lists: list[tuple[Tensor, Tensor]] = []
        for x in p.equalities:
            cells = _equal_cells(x, most)
            if cells is None:
                return None
            rows, columns = cells
            for y in p.equalities[: len(lists)]:  # whose cells are listed already
                is_new = y.rows[rows] != y.columns[columns]
                rows, columns = rows[is_new], columns[is_new]
            lists.append((rows, columns))
        if not lists:
            none = torch.zeros(0, dtype=torch.int64, device=self.device)
            return none, none, none.to(self.dtype)
        rows, columns = (torch.cat(several) for several in zip(*lists, strict=True))
        order = (rows * self.size[1] + columns).argsort()
        return p.not_zero(rows[order], columns[order])

    def not_zero(self, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Those of the cells (rows[i], columns[i]) that are not 0, and their numbers."""
        numbers = self.of_cells(rows, columns)
        if all(self.values):
            return rows, columns, numbers
        (there,) = numbers.nonzero(as_tuple=True)
        return rows[there], columns[there], numbers[there]


_IDENTITY = torch.tensor([0, 1], device="cpu")


def of_diagonal(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Pattern:
    """Ones where the numbers of row and column are the same."""
    numbers = torch.arange(max(rows, columns), device=device)
    equality = Equality(numbers[:rows], numbers[:columns], is_diagonal=True)
    return Pattern((rows, columns), (equality,), _IDENTITY.to(dtype), device)


def constant(size: tuple[int, int], value: Tensor, device: torch.device) -> Pattern:
    """A matrix of one number."""
    return Pattern(size, (), value.reshape(1), device)


def union(several: Sequence[Pattern]) -> tuple[Equality, ...]:
    """The equalities of several matrices, each once."""
    equalities: list[Equality] = []
    for pattern in several:
        for x in pattern.equalities:
            if not any(x.is_same(y) for y in equalities):
                equalities.append(x)
    return tuple(equalities)


def _halves(values: list[float], count: int, i: int) -> tuple[list[float], list[float]]:
    """The numbers of a table of `count` equalities where the i-th does not hold, and where it does."""
    bit = 1 << (count - 1 - i)
    halves: tuple[list[float], list[float]] = ([], [])
    for place, x in enumerate(values):
        halves[bool(place & bit)].append(x)
    return halves


def _chosen(table: Tensor, ids: list[tuple[Tensor, Tensor]]) -> Tensor:
    if not ids:
        return table
    (rows, columns), *rest = ids
    return torch.where(rows == columns, _chosen(table[1], rest), _chosen(table[0], rest))


def _sums(held: list[Equality], x: Tensor) -> Tensor:
    """For each row the sum of those rows of x, (M, D), with which all of these equalities hold."""
    if not held:
        return x.sum(0, keepdim=True)
    N, M = len(held[0].rows), len(x)
    if any(equality.is_diagonal for equality in held):
        cells = slice(min(N, M))
        for equality in held:
            if not equality.is_diagonal:
                equal = equality.rows[cells] == equality.columns[cells]
                x = x[cells] * equal[:, None]
        return x[:N] if N <= M else torch.cat([x[cells], x.new_zeros(N - M, x.shape[1])])

    if len(held) == 1:
        both = torch.cat([held[0].rows, held[0].columns])
        numbers = torch.unique(both, return_inverse=True)[1]
    else:
        both = torch.stack([torch.cat([equality.rows, equality.columns]) for equality in held], 1)
        numbers = torch.unique(both, dim=0, return_inverse=True)[1]
    sums = x.new_zeros(len(both), x.shape[1]).index_add(0, numbers[N:], x)
    return sums[numbers[:N]]


def _counts(held: list[Equality], ones: Tensor) -> Tensor:
    """The same of ones."""
    if len(held) == 1 and not held[0].is_diagonal:
        return held[0].in_order[2][:, None].to(ones.dtype)
    return _sums(held, ones)


def _equal_cells(x: Equality, most: int) -> tuple[Tensor, Tensor] | None:
    """Rows and columns of the cells that are equal; None where there are more than `most`."""
    if x.is_diagonal:
        both = x.rows[: len(x.columns)]
        return both, both
    order, begins, counts = x.in_order
    total = int(counts.sum())
    if total > most:
        return None
    rows = torch.repeat_interleave(counts, output_size=total)
    starts = counts.cumsum(0) - counts
    entries = torch.arange(total, device=rows.device)
    return rows, order[(begins - starts)[rows] + entries]
