"""Targets: which candidates each query is to find, as linear operators.

A target matrix T (N, M) is never formed. `Targets.rows` lowers an operator to compressed
rows, O(number of targets), which is all that the loss needs of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TypeAlias

import torch
from torch import Tensor

from fastqt.checks import as_ids, require

IGNORE_INDEX = -100

# Windows of small batches, which training asks for at every step, and which take longer to
# lower than such a batch's scores to compute.
_BAND_CACHE_SIZE = 8
_BAND_CACHE_ENTRIES = 2**16


@dataclass(frozen=True)
class TargetRows:
    """T (N, M) as compressed rows or as a matrix, plus `background[i]` on every cell of row i.

    Explicit zeros are allowed and mean nothing; a row names a column at most once. With `offsets`, entry k
    of row i is in column i + offsets[k], or means nothing.
    """

    starts: Tensor | None = None  # (N + 1,) int64
    columns: Tensor | None = None  # (nnz,) int64
    weights: Tensor | None = None  # (nnz,) float64
    dense: Tensor | None = None  # (N, M)
    background: Tensor | None = None  # (N,) float64
    offsets: tuple[int, ...] | None = None

    def entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, columns and float64 weights of the entries that are not zero, each (nnz,)."""
        if self.dense is not None:
            row, column = self.dense.nonzero(as_tuple=True)
            return row, column, self.dense[row, column].double()
        starts, columns, weights = self.compressed()
        row = torch.repeat_interleave(starts.diff(), output_size=columns.numel())
        given = weights != 0
        return row[given], columns[given], weights[given]

    def compressed(self) -> tuple[Tensor, Tensor, Tensor]:
        """`starts`, `columns` and `weights` of targets that are not dense."""
        assert self.starts is not None
        assert self.columns is not None
        assert self.weights is not None
        return self.starts, self.columns, self.weights

    def to_dense(self, N: int, M: int) -> Tensor:
        """T (N, M) float64."""
        row, column, weight = self.entries()
        T = weight.new_zeros(N, M).index_put((row, column), weight)
        return T if self.background is None else T + self.background[:, None]


class Targets(ABC):
    """An operator T (N, M) with non-negative entries T_ij: how much of row i's mass candidate j is due."""

    @abstractmethod
    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        """T for N queries and M candidates, on `device`."""

    @abstractmethod
    def check(self, N: int, M: int, diagonal: str) -> None:
        """Raises ValueError if T is not defined for these sizes, or has targets on a replaced diagonal."""

    def to_dense(self, N: int, M: int) -> Tensor:
        """T as a matrix (N, M) float64 on the CPU: to look at, for small N."""
        return self.rows(N, M, torch.device("cpu")).to_dense(N, M)


_band_cache: dict[tuple[object, ...], TargetRows] = {}
_graphs_bands: dict[int, TargetRows] = {}  # by identity, for good


class Window(Targets):
    """The neighbours at given offsets: row i's targets are candidates i + o inside [0, M).

    Args:
        size: half-width k; the offsets are -k..k without 0. QuickThoughts' "context size 3" is k=1.
        offsets: explicit offsets instead, e.g. [1] for the next sentence only.
        weights: one positive weight per offset; 1 by default.
        normalize: divide each row by the sum of its weights inside [0, M), so that it sums to 1
            (and to 0 where it has no target).
        document_ids: (N,) integers; row i only has targets with the same id. Needs M = N.
            `Window(b - 1, document_ids=torch.arange(N) // b)` makes blocks of b sentences.

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations"
    (2018), section 3.
    """

    def __init__(
        self,
        size: int = 1,
        *,
        offsets: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        normalize: bool = True,
        document_ids: Tensor | None = None,
    ) -> None:
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"size (context_size): want an integer >= 1, got {size!r}")
        if offsets is None:
            self.offsets = (*range(-size, 0), *range(1, size + 1))
        else:
            self.offsets = _checked_offsets(offsets)
        count = len(self.offsets)
        self.weights = (1.0,) * count if weights is None else _checked_weights(weights, count)
        self.normalize = normalize
        self.document_ids = None if document_ids is None else as_ids("document_ids", document_ids)

    def check(self, N: int, M: int, diagonal: str) -> None:
        reach = max(map(abs, self.offsets))
        if reach >= max(N, M):
            raise ValueError(
                f"context_size: offsets reach {reach} rows, want less than the batch, got N={N} queries "
                f"and M={M} candidates"
            )
        if 0 in self.offsets and diagonal != "keep":
            raise ValueError(
                f"targets: Window has offset 0, on the diagonal that diagonal={diagonal!r} replaces; "
                "use diagonal='keep'"
            )
        if self.document_ids is not None and not self.document_ids.numel() == N == M:
            raise ValueError(
                f"document_ids: want one id for each of N={N} queries, and as many candidates, "
                f"got {self.document_ids.numel()} ids and M={M} candidates"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        if self.document_ids is None and N * len(self.offsets) <= _BAND_CACHE_ENTRIES:
            return self._cached_rows(N, M, device)
        return self._rows(N, M, device)

    def _cached_rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        if torch.compiler.is_compiling():
            return self._rows(N, M, device)
        key = (N, M, self.offsets, self.weights, self.normalize, device)
        rows = _band_cache.get(key)
        if _is_captured(device):  # what a graph reads stays, and what is made in its memory is its own
            if rows is None:
                return self._rows(N, M, device)
            _graphs_bands[id(rows)] = rows
        if rows is None:
            with torch.inference_mode(False):  # a later call may save these for backward
                rows = self._rows(N, M, device)
            if type(rows.columns) is Tensor:  # and not a tracer's
                while len(_band_cache) >= _BAND_CACHE_SIZE:
                    _band_cache.pop(next(iter(_band_cache)), None)
                _band_cache[key] = rows
        return rows

    def _rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        row = torch.arange(N, device=device)
        # Numbers reach a GPU as arguments of its kernels; a tensor of them would have to be waited for.
        columns = torch.stack([row + offset for offset in self.offsets], 1)
        valid = (columns >= 0) & (columns < M)
        # A column moved into range may name another target's once more: its weight is 0.
        columns = columns.clamp(0, M - 1)
        if self.document_ids is not None:
            ids = self.document_ids.to(device)
            valid = valid & (ids[columns] == ids[:, None])
        weights = torch.stack([valid[:, k].double() * weight for k, weight in enumerate(self.weights)], 1)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        return replace(_equal_rows(columns, weights), offsets=self.offsets)


def _is_captured(device: torch.device) -> bool:
    """Whether what is launched there now becomes part of a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _checked_offsets(offsets: Sequence[int]) -> tuple[int, ...]:
    if not offsets or len(set(offsets)) != len(offsets) or not all(isinstance(o, int) for o in offsets):
        raise ValueError(f"offsets: want distinct integers, at least one, got {list(offsets)!r}")
    return tuple(offsets)


def _checked_weights(weights: Sequence[float], count: int) -> tuple[float, ...]:
    if len(weights) != count or not all(isinstance(w, Real) and 0 < w < float("inf") for w in weights):
        raise ValueError(
            f"weights: want one positive number for each of {count} offsets, got {list(weights)!r}"
        )
    return tuple(float(w) for w in weights)


class Diagonal(Targets):
    """Row i's target is candidate i, as in InfoNCE. Needs diagonal='keep'; rows beyond M have none."""

    def check(self, N: int, M: int, diagonal: str) -> None:
        if diagonal != "keep":
            raise ValueError(
                f"targets: Diagonal() has its targets on the diagonal that diagonal={diagonal!r} replaces; "
                "use diagonal='keep'"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        starts = torch.arange(N + 1, device=device)
        if N > M:
            starts = starts.clamp(max=M)
        columns = starts[: min(N, M)]
        return TargetRows(starts, columns, torch.ones_like(columns, dtype=torch.float64), offsets=(0,))


class Sparse(Targets):
    """Targets from a sparse CSR tensor.

    Args:
        csr_tensor: (N, M), layout torch.sparse_csr, floating point, entries >= 0, no cell twice (as
            `torch.sparse.check_sparse_tensor_invariants` has it). No gradient flows to it.
    """

    def __init__(self, csr_tensor: Tensor) -> None:
        if csr_tensor.layout is not torch.sparse_csr or csr_tensor.dim() != 2:
            raise ValueError(
                f"csr_tensor: want a 2-D tensor of layout torch.sparse_csr, got {csr_tensor.dim()}-D of "
                f"layout {csr_tensor.layout}"
            )
        if not csr_tensor.dtype.is_floating_point:
            raise TypeError(f"csr_tensor: want a floating-point dtype, got {csr_tensor.dtype}")
        csr_tensor = csr_tensor.detach()
        self.shape = tuple(csr_tensor.shape)
        self._rows = TargetRows(
            csr_tensor.crow_indices().long(), csr_tensor.col_indices().long(), csr_tensor.values().double()
        )

    def check(self, N: int, M: int, diagonal: str) -> None:
        _check_shape(self.shape, N, M)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        starts, columns, weights = (x.to(device) for x in self._rows.compressed())
        return TargetRows(starts, columns, weights)


class ClassIndices(Targets):
    """One target column a row, as in `torch.nn.functional.cross_entropy`; -100 means none.

    Args:
        indices: (N,) integers in [0, M), or -100.
    """

    def __init__(self, indices: Tensor) -> None:
        self.indices = as_ids("targets", indices)

    def check(self, N: int, M: int, diagonal: str) -> None:
        if self.indices.numel() != N:
            raise ValueError(
                f"targets: want a class index for each of N={N} queries, got {self.indices.numel()}"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        indices = self.indices.to(device)
        given = indices != IGNORE_INDEX
        return _equal_rows(torch.where(given, indices, 0)[:, None], given.double()[:, None])


class Bags(Targets):
    """Weight 1 on each of a row's ids, which come as `torch.nn.EmbeddingBag` takes them.

    Args:
        name: of the ids, in errors.
        ids: (T,) integers in [0, M), all rows' one after the other; one that a row names twice counts once.
        offsets: (N,) integers, where each row's ids begin.
    """

    def __init__(self, name: str, ids: Tensor, offsets: Tensor) -> None:
        self.name = name
        self.ids = as_ids(name, ids)
        self.offsets = as_ids("offsets", offsets)

    def check(self, N: int, M: int, diagonal: str) -> None:
        if self.offsets.numel() != N:
            raise ValueError(f"offsets: want one for each of N={N} rows, got {self.offsets.numel()}")
        rising = (self.offsets[0] == 0) & (self._starts().diff() >= 0).all()
        require(rising, f"offsets: want rising ones from 0 to the {self.ids.numel()} {self.name}")
        inside = (self.ids >= 0) & (self.ids < M)
        require(inside.all(), f"{self.name}: want integers in 0..{M - 1}", self.ids)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        ids, starts = self.ids.to(device), self._starts().to(device)
        row = torch.repeat_interleave(starts.diff(), output_size=ids.numel())
        cells = (row * M + ids).sort().values
        # An id that a row names once more: its weight is 0.
        weights = torch.ones_like(cells, dtype=torch.float64)
        weights[1:] = cells[1:] != cells[:-1]
        return TargetRows(starts, cells % M, weights)

    def _starts(self) -> Tensor:
        return torch.nn.functional.pad(self.offsets, (0, 1), value=self.ids.numel())


class Dense(Targets):
    """An explicit target matrix.

    Args:
        matrix: (N, M) floating point, entries >= 0. No gradient flows to it.
    """

    def __init__(self, matrix: Tensor) -> None:
        if not matrix.dtype.is_floating_point:
            raise TypeError(f"targets: want a floating-point (N, M) tensor, got dtype {matrix.dtype}")
        self.matrix = matrix.detach()

    def check(self, N: int, M: int, diagonal: str) -> None:
        _check_shape(tuple(self.matrix.shape), N, M)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        return TargetRows(dense=self.matrix.to(device))


class Smoothed(Targets):
    """Other targets with a constant added to every cell; see `smoothed`."""

    def __init__(self, base: Targets, smoothing: float, normalize: bool) -> None:
        self.base = base
        self.smoothing = smoothing
        self.normalize = normalize

    def check(self, N: int, M: int, diagonal: str) -> None:
        self.base.check(N, M, diagonal)
        if diagonal == "exclude":
            raise ValueError(
                "targets: smoothed targets give every candidate mass, which diagonal='exclude' forbids; "
                "use diagonal='zero' or 'keep'"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        rows = self.base.rows(N, M, device)
        background = torch.full((N,), self.smoothing, dtype=torch.float64, device=device)
        if rows.background is not None:
            background = background + rows.background
        if rows.dense is not None:
            if not self.normalize:
                return TargetRows(dense=rows.dense, background=background)
            divisor = rows.dense.double().sum(1) + M * background
            return TargetRows(dense=rows.dense / divisor[:, None], background=background / divisor)
        starts, columns, weights = rows.compressed()
        if not self.normalize:
            return TargetRows(starts, columns, weights, background=background)
        row = torch.repeat_interleave(starts.diff(), output_size=weights.numel())
        divisor = (M * background).index_add(0, row, weights)
        return TargetRows(starts, columns, weights / divisor[row], background=background / divisor)


TargetsLike: TypeAlias = Targets | Tensor


def smoothed(targets: TargetsLike, smoothing: float = 0.1, *, normalize: bool = True) -> Targets:
    """Targets with `smoothing` added to every cell, rows then divided by their sum.

    Args:
        targets: any targets, as `contrastive_loss` takes them.
        smoothing: > 0, in the units of the given targets' weights.
        normalize: divide each row by its sum.

    Every candidate becomes a target, the row's own diagonal cell too, so that neither
    diagonal='exclude' nor masks nor groups go with it. A row without targets becomes uniform.

    Source: the "smoothing" of the published QuickThoughts re-implementation, where all cells
    are 0.1 and those of the window 1.1 before the division.
    """
    if not isinstance(smoothing, Real) or not 0 < smoothing < float("inf"):
        raise ValueError(f"smoothing: want a positive number, got {smoothing!r}")
    return Smoothed(as_targets(targets), float(smoothing), normalize)


def as_targets(targets: TargetsLike) -> Targets:
    """The operator for what a user may give: an operator, class indices (N,), or a matrix (N, M)."""
    if isinstance(targets, Targets):
        return targets
    if isinstance(targets, Tensor):
        if targets.layout is torch.sparse_csr:
            return Sparse(targets)
        if targets.dim() == 1:
            return ClassIndices(targets)
        if targets.dim() == 2:
            return Dense(targets)
        raise ValueError(f"targets: want (N,) class indices or an (N, M) matrix, got {targets.dim()}-D")
    raise TypeError(f"targets: want fastqt targets or a tensor, got {type(targets).__name__}")


def _equal_rows(columns: Tensor, weights: Tensor) -> TargetRows:
    """From columns (N, K) and weights (N, K) float64: K entries a row."""
    N, K = columns.shape
    starts = torch.arange(0, N * K + 1, K, device=columns.device)
    return TargetRows(starts, columns.reshape(-1), weights.reshape(-1))


def _check_shape(shape: tuple[int, ...], N: int, M: int) -> None:
    if shape != (N, M):
        raise ValueError(f"targets: want shape (N, M) = ({N}, {M}), got {shape}")
