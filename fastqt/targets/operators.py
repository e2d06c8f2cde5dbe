"""Target operators of one target per row, bags and dense matrices, smoothing, and what users may pass."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from fastqt.checks import FLOATING, check_paired, check_tensor, require
from fastqt.devices import accumulation_dtype
from fastqt.ids import as_ids
from fastqt.targets import cache
from fastqt.targets.base import (
    IGNORE_INDEX,
    ShardRows,
    TargetRows,
    Targets,
    check_diagonal_of_smoothed,
    check_shape,
    check_smoothing,
    smoothed_rows,
)
from fastqt.targets.sparse import Sparse
from fastqt.targets.window import Window

NEIGHBOURS = {normalize: Window(normalize=normalize) for normalize in (True, False)}


class NoTargets(Targets):
    """T = 0: what losses without targets are lowered to."""

    def check(self, N: int, M: int, diagonal: str) -> None:
        pass

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        if N > cache.MOST_ENTRIES:
            return _no_rows(N, M, device)
        return cache.CACHED.rows(NoTargets, _no_rows, N, M, device)


def _no_rows(N: int, M: int, device: torch.device) -> TargetRows:
    starts = torch.zeros(N + 1, dtype=torch.int64, device=device)
    return TargetRows(starts, starts[:0], torch.zeros(0, dtype=accumulation_dtype(device), device=device))


class Diagonal(Targets):
    """Candidate i is the only target of row i, as in InfoNCE. Rows i >= M have no target.

    Needs diagonal='keep', because the other options replace the scores of exactly these cells.

    Example:
        >>> import torch, fastqt
        >>> fastqt.Diagonal().to_dense(2, 3).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> fastqt.contrastive_loss(queries, candidates, fastqt.Diagonal(), diagonal="keep").shape
        torch.Size([])
    """

    def check(self, N: int, M: int, diagonal: str) -> None:
        if diagonal != "keep":
            raise ValueError(
                f"targets: Diagonal() has its targets on the diagonal that diagonal={diagonal!r} replaces; "
                "use diagonal='keep'"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        if N > cache.MOST_ENTRIES:
            return _diagonal_rows(N, M, device)
        return cache.CACHED.rows(Diagonal, _diagonal_rows, N, M, device)

    def of_shard(self, shard: ShardRows) -> Targets:
        return _DiagonalOfShard(self, shard)


def _diagonal_rows(N: int, M: int, device: torch.device, first: int = 0) -> TargetRows:
    starts = torch.arange(N + 1, device=device)
    within = max(min(N, M - first), 0)
    if within < N:
        starts = starts.clamp(max=within)
    columns = starts[:within]
    if first:
        columns = columns + first
    weights = torch.ones_like(columns, dtype=accumulation_dtype(device))
    return TargetRows(starts, columns, weights, offsets=columns[:1])


class _DiagonalOfShard(Targets):
    """The rows of a diagonal that one of several processes holds."""

    def __init__(self, diagonal: Diagonal, shard: ShardRows) -> None:
        self.diagonal, self.shard = diagonal, shard

    def check(self, N: int, M: int, diagonal: str) -> None:
        self.diagonal.check(self.shard.N, M, diagonal)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        def lower(N: int, M: int, device: torch.device) -> TargetRows:
            return _diagonal_rows(N, M, device, self.shard.first)

        if N > cache.MOST_ENTRIES:
            return lower(N, M, device)
        return cache.CACHED.rows((Diagonal, self.shard.first), lower, N, M, device)


class Pairs(Diagonal):
    """`Diagonal` where each query has its candidate: no fewer candidates than queries."""

    def check(self, N: int, M: int, diagonal: str) -> None:
        check_paired("queries", N, "candidates", M)
        super().check(N, M, diagonal)


class ClassIndices(Targets):
    """One target column per row, (N,) integers in [0, M) or -100 for none, as of `F.cross_entropy`."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = as_ids("targets", indices)

    def check(self, N: int, M: int, diagonal: str) -> None:
        if self.indices.numel() != N:
            raise ValueError(
                f"targets: want a class index for each of N={N} queries, got {self.indices.numel()}"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        indices = self.indices.to(device)
        has_target = indices != IGNORE_INDEX
        starts, _, _ = Diagonal().rows(N, N, device).compressed()  # which has as many entries
        return TargetRows(starts, indices * has_target, has_target.to(accumulation_dtype(device)))


class Bags(Targets):
    """A set of target columns per row, each of weight 1, in the form that `torch.nn.EmbeddingBag` takes.

    `ids`, (T,) integers in [0, M), are the rows' ids concatenated; an id that a row names twice counts once.
    `offsets`, (N,) integers, say where each row begins. Errors call the ids `name`.
    """

    def __init__(self, name: str, ids: Tensor, offsets: Tensor) -> None:
        self.name = name
        self.ids = as_ids(name, ids)
        self.offsets = as_ids("offsets", offsets)

    def check(self, N: int, M: int, diagonal: str) -> None:
        if self.offsets.numel() != N:
            raise ValueError(f"offsets: want one for each of N={N} rows, got {self.offsets.numel()}")
        ascending = (self.offsets[0] == 0) & (self._starts().diff() >= 0).all()
        require(
            ascending,
            "offsets: want rising values from 0 to {n}, the number of " + self.name,
            n=self.ids.numel(),
        )
        inside = (self.ids >= 0) & (self.ids < M)
        require(inside.all(), self.name + ": want integers in 0..{last}", self.ids, last=M - 1)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        ids, starts = self.ids.to(device), self._starts().to(device)
        row = torch.repeat_interleave(starts.diff(), output_size=ids.numel())
        cells = (row * M + ids).sort().values
        # After the sort, an id that a row repeats follows itself. Its repetitions get weight 0.
        weights = torch.ones_like(cells, dtype=accumulation_dtype(device))
        weights[1:] = cells[1:] != cells[:-1]
        return TargetRows(starts, cells % M, weights)

    def _starts(self) -> Tensor:
        return torch.cat([self.offsets, self.offsets.new_full((1,), self.ids.numel())])


class Dense(Targets):
    """A target matrix (N, M), floating point with entries >= 0. No gradient flows to it."""

    def __init__(self, matrix: Tensor) -> None:
        check_tensor("targets", matrix)
        if matrix.dtype not in FLOATING:
            raise TypeError(
                f"targets: want a floating-point (N, M) tensor, got {matrix.dtype}; convert it by float()"
            )
        self.matrix = matrix.detach()

    def check(self, N: int, M: int, diagonal: str) -> None:
        check_shape(tuple(self.matrix.shape), N, M)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        return TargetRows(dense=self.matrix.to(device))


class Smoothed(Targets):
    """Other targets with the constant `smoothing` added to every cell; see `smoothed`."""

    def __init__(self, base: Targets, smoothing: float, normalize: bool) -> None:
        self.base = base
        self.smoothing = smoothing
        self.normalize = normalize

    def kind(self) -> str:
        return f"smoothed {self.base.kind()}"

    def check_queries(self, n: int) -> None:
        self.base.check_queries(n)

    def of_shard(self, shard: ShardRows) -> Targets:
        return Smoothed(self.base.of_shard(shard), self.smoothing, self.normalize)

    def check(self, N: int, M: int, diagonal: str) -> None:
        self.base.check(N, M, diagonal)
        check_diagonal_of_smoothed(diagonal)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        return smoothed_rows(self.base.rows(N, M, device), N, M, self.smoothing, self.normalize)


class Rolled(Targets):
    """Other targets for candidates of which the first `shift` have been moved behind all others."""

    def __init__(self, base: Targets, shift: int) -> None:
        self.base, self.shift = base, shift

    def check(self, N: int, M: int, diagonal: str) -> None:
        self.base.check(N, M, diagonal)

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        rows = self.base.rows(N, M, device)
        if rows.dense is not None:
            return TargetRows(dense=rows.dense.roll(-self.shift, 1), background=rows.background)
        starts, columns, weights = rows.compressed()
        inside = (columns >= 0) & (columns < M)  # Engines name the row of a column outside.
        columns = ((columns - self.shift) % M).where(inside, columns)
        return TargetRows(starts, columns, weights, background=rows.background)


TargetsLike: TypeAlias = Targets | Tensor


def smoothed(targets: TargetsLike, smoothing: float = 0.1, *, normalize: bool = True) -> Targets:
    """Adds `smoothing` to every cell of T and then divides each row by its sum.

    A `Window` that is given here has been divided by its sums already: with several offsets, the published
    "smoothing" is `Window(..., smoothing=0.1)`, where every cell of the band is 1 beside 0.1.

    Every candidate becomes a target, including the diagonal cell of the row. Smoothed targets can therefore
    not be combined with diagonal='exclude', a mask or groups. A row without targets becomes uniform.

    Args:
        targets: any targets that `contrastive_loss` takes.
        smoothing: a number of at least 1e-290, in the units of the weights of `targets`.
        normalize: divide each row by its sum.

    Returns:
        The smoothed operator.

    Raises:
        ValueError: smoothing that is out of range, or a tensor of a wrong shape as targets.
        TypeError: targets of another type, or smoothing that is not a number.

    Example:
        >>> import torch, fastqt
        >>> targets = fastqt.smoothed(fastqt.Diagonal(), 0.5)  # rows (1.5, 0.5), divided by 2
        >>> targets.to_dense(2, 2).tolist()
        [[0.75, 0.25], [0.25, 0.75]]
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> fastqt.contrastive_loss(queries, candidates, targets, diagonal="keep").shape
        torch.Size([])

    Source: the "smoothing" of the published QuickThoughts re-implementation, in which all cells are 0.1,
    and those of the window 1.1, before the division.
    """
    check_smoothing(smoothing)
    return Smoothed(as_targets(targets), float(smoothing), normalize)


def as_targets(targets: TargetsLike) -> Targets:
    """Targets from an operator, (N,) integer class indices, or an (N, M) matrix, dense or sparse CSR."""
    if isinstance(targets, Targets):
        return targets
    if isinstance(targets, Tensor):
        if targets.layout is torch.sparse_csr:
            return Sparse(targets)
        check_tensor("targets", targets)
        if targets.dim() == 1:
            return ClassIndices(targets)
        if targets.dim() == 2:
            return Dense(targets)
        raise ValueError(f"targets: want (N,) class indices or an (N, M) matrix, got {targets.dim()}-D")
    raise TypeError(f"targets: want fastqt targets or a tensor, got {type(targets).__name__}")


def given_or_window(
    targets: TargetsLike | None,
    context_size: int | None,
    document_ids: Tensor | None,
    *,
    normalize: bool = True,
) -> Targets:
    """The targets that a user has given, or the default ones: each sentence's neighbours in a `Window`.

    Arguments of the window are refused beside targets.
    """
    if targets is None:
        if context_size is None and document_ids is None:
            return NEIGHBOURS[normalize]
        return Window(context_size, document_ids=document_ids, normalize=normalize)
    for name, value in (("context_size", context_size), ("document_ids", document_ids)):
        if value is not None:
            raise ValueError(f"{name}: want it in Window(...) when targets are given, got it beside them")
    return as_targets(targets)
