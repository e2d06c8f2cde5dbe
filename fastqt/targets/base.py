"""The interface of target operators, and the compressed rows that they are lowered to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt.checks import check_number
from fastqt.devices import accumulation_dtype

IGNORE_INDEX = -100  # the class index that means "no target", as in `torch.nn.functional.cross_entropy`


@dataclass(frozen=True)
class TargetRows:
    """The target matrix T of shape (N, M), as compressed sparse rows or as a dense matrix.

    Either `starts`, `columns` and `weights` are given, or `dense` is. Entries with weight 0 are allowed and
    have no effect. A row names a column at most once among its entries with nonzero weight.

    Attributes:
        starts: (N + 1,) int64; row i owns the entries starts[i] to starts[i + 1] - 1.
        columns: (nnz,) int64; the column of each entry.
        weights: (nnz,) float64, or float32 on a device that has no float64; the value T_ij of each entry.
        dense: (N, M); T itself.
        background: (N,) of the same dtype; a constant that is added to every cell of row i.
        offsets: (K,) int64; if given, T is banded: entry i K + k is in row i, and in column i + offsets[k]
            or of weight 0. Such targets are sound wherever their operator's `check` passes, but for a mask.
        cached: whether a cache of the library holds the tensors, so that nobody changes them.
    """

    starts: Tensor | None = None
    columns: Tensor | None = None
    weights: Tensor | None = None
    dense: Tensor | None = None
    background: Tensor | None = None
    offsets: Tensor | None = None
    cached: bool = False

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and weight of the nonzero entries, each (nnz,); `background` is left out."""
        if self.dense is not None:
            row, column = self.dense.nonzero(as_tuple=True)
            return row, column, self.dense[row, column].to(accumulation_dtype(row.device))
        row, column, weight = self.all_entries()
        nonzero = weight != 0
        return row[nonzero], column[nonzero], weight[nonzero]

    def all_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """As `entries`, with those of weight 0, so that their number does not depend on values."""
        if self.dense is not None:
            N, M = self.dense.shape
            cells = torch.arange(N * M, device=self.dense.device)
            return cells // M, cells % M, self.dense.flatten().to(accumulation_dtype(cells.device))
        starts, columns, weights = self.compressed()
        row = torch.repeat_interleave(starts.diff(), output_size=columns.numel())
        return row, columns, weights

    def compressed(self) -> tuple[Tensor, Tensor, Tensor]:
        """`starts`, `columns` and `weights`; only for targets that are not dense."""
        assert self.starts is not None
        assert self.columns is not None
        assert self.weights is not None
        return self.starts, self.columns, self.weights

    def of_columns(self, first: int, count: int) -> TargetRows:
        """T's columns from `first` to `first + count - 1` alone, counted from the first of them."""
        if self.dense is not None:
            return TargetRows(dense=self.dense[:, first : first + count], background=self.background)
        starts, columns, weights = self.compressed()
        inside = (columns >= first) & (columns < first + count)
        before = torch.cat([starts.new_zeros(1), inside.cumsum(0)])
        return TargetRows(
            before[starts], columns[inside] - first, weights[inside], background=self.background
        )

    def rows_with_targets(self) -> Tensor:
        """The number of rows that have a target, () int64."""
        if self.background is not None:
            return (self.background != 0).sum()
        if self.dense is not None:
            return (self.dense != 0).any(1).sum()
        starts, _, weights = self.compressed()
        before = torch.cat([starts.new_zeros(1), (weights != 0).cumsum(0)])
        return (before[starts].diff() > 0).sum()

    def largest_mass(self, M: int) -> Tensor:
        """The largest sum of a row of T, which has M columns, () in the dtype of accumulation."""
        if self.dense is not None:
            mass = self.dense.sum(1, dtype=accumulation_dtype(self.dense.device))
        else:
            starts, _, weights = self.compressed()
            mass = torch.cat([weights.new_zeros(1), weights.cumsum(0)])[starts].diff()
        if self.background is not None:
            mass = mass + M * self.background
        return mass.amax()

    def to_dense(self, N: int, M: int) -> Tensor:
        """T as a matrix (N, M) in the dtype of the weights, with `background` added."""
        if self.dense is not None:
            T = self.dense.to(accumulation_dtype(self.dense.device), copy=True)
        else:
            row, column, weight = self.all_entries()
            there = weight != 0  # A column of weight 0 may be none of the matrix.
            T = weight.new_zeros(N, M).index_put((row, column.where(there, 0)), weight, accumulate=True)
        return T if self.background is None else T + self.background[:, None]


class ShardRows(NamedTuple):
    """Which rows of the batch one of several processes holds."""

    first: int  # the index of its first query
    N: int
    M: int
    # The first and the last candidate, exclusive, that windows of neighbours may reach.
    window: tuple[int, int]
    gather: Callable[[Tensor], Tensor]  # joins 1-D tensors of integers, one for each query, of all processes


class Targets(ABC):
    """A linear operator T of shape (N, M); T_ij >= 0 is the weight of candidate j as a target of query i."""

    @abstractmethod
    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        """Lowers T for N queries and M candidates to rows on `device`. Call `check` first."""

    @abstractmethod
    def check(self, N: int, M: int, diagonal: str) -> None:
        """Checks that T is defined for N queries and M candidates, with this option `diagonal` of the loss.

        "zero" and "exclude" replace the scores of the cells (i, i), so that these cells cannot be targets.
        """

    def kind(self) -> str:
        """What several processes that share a batch must all have."""
        return type(self).__name__

    def check_queries(self, n: int) -> None:
        """Checks what is given query by query and that several processes join, for one that has n queries."""
        return

    def of_shard(self, shard: ShardRows) -> Targets:
        """T's rows of the queries that one process holds, over the candidates of all of them.

        Targets that users give row by row are those rows already, with columns of the whole batch.
        """
        return self

    def to_dense(self, N: int, M: int) -> Tensor:
        """T as a matrix (N, M) float64 on the CPU, to inspect a small example."""
        return self.rows(N, M, torch.device("cpu")).to_dense(N, M)


# Weights that a row's sum divides are multiplied by this first, so that no sum overflows. The least smoothing
# is still a normal number then, beside which the digits do not count that smaller weights lose.
SHRINK = 2.0**-40
LEAST_SMOOTHING = 1e-290


def check_smoothing(smoothing: object) -> None:
    """Raises ValueError or TypeError unless `smoothing` is a number of at least 1e-290."""
    check_number("smoothing", smoothing)
    assert isinstance(smoothing, (int, float))
    if smoothing < LEAST_SMOOTHING:
        raise ValueError(f"smoothing: want a positive number, at least {LEAST_SMOOTHING}, got {smoothing}")


def check_diagonal_of_smoothed(diagonal: str) -> None:
    """Raises ValueError where cells that smoothing makes targets are excluded."""
    if diagonal == "exclude":
        raise ValueError(
            "targets: smoothed targets give every candidate mass, which diagonal='exclude' forbids; "
            "use diagonal='zero' or 'keep'"
        )


def smoothed_rows(rows: TargetRows, N: int, M: int, smoothing: float, normalize: bool) -> TargetRows:
    """T (N, M) with `smoothing` added to every cell, and then each row divided by its sum if `normalize`."""
    unit = SHRINK if normalize else 1.0
    device = (rows.compressed()[0] if rows.dense is None else rows.dense).device
    dtype = accumulation_dtype(device)
    background = torch.full((N,), smoothing * unit, dtype=dtype, device=device)
    if rows.background is not None:
        background = background + rows.background * unit
    if rows.dense is not None:
        if not normalize:
            return TargetRows(dense=rows.dense, background=background)
        dense = rows.dense.to(dtype) * unit
        divisor = dense.sum(1) + M * background
        return TargetRows(dense=dense / divisor[:, None], background=background / divisor)
    starts, columns, weights = rows.compressed()
    if not normalize:
        return TargetRows(starts, columns, weights, background=background)
    weights = weights * unit
    row = torch.repeat_interleave(starts.diff(), output_size=weights.numel())
    divisor = (M * background).index_add(0, row, weights)
    return TargetRows(starts, columns, weights / divisor[row], background=background / divisor)


def rows_of_equal_length(columns: Tensor, weights: Tensor) -> TargetRows:
    """Compressed rows of K entries each, from columns (N, K) int64 and weights (N, K) float64."""
    N, K = columns.shape
    starts = torch.arange(0, N * K + 1, K, device=columns.device)
    return TargetRows(starts, columns.reshape(-1), weights.reshape(-1))


def check_shape(shape: tuple[int, ...], N: int, M: int) -> None:
    """Raises ValueError unless a target matrix has a row for each query and a column for each candidate."""
    if shape != (N, M):
        raise ValueError(f"targets: want shape (N, M) = ({N}, {M}), got {shape}")
