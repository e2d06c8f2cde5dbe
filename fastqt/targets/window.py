"""The window of neighbouring sentences."""

from __future__ import annotations

import math
import sys
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real

import torch
from torch import Tensor

from fastqt.checks import shown
from fastqt.devices import accumulation_dtype
from fastqt.ids import as_ids
from fastqt.targets import cache
from fastqt.targets.base import (
    ShardRows,
    TargetRows,
    Targets,
    check_diagonal_of_smoothed,
    check_smoothing,
    rows_of_equal_length,
    smoothed_rows,
)

LEAST_SHARE = 1e-250  # of the least weight in the greatest, so that none of them underflows beside the other


class Window(Targets):
    """Neighbours at fixed offsets: the targets of row i are the candidates i + o inside [0, M).

    Args:
        size: half-width k >= 1, by default 1; the offsets are -k..k without 0. The "context size 3" of
            QuickThoughts is k = 1.
        offsets: explicit offsets in place of `size`, e.g. [1] for the next sentence only.
        weights: one positive weight for each offset; 1 by default. Weights that are normalised differ by a
            factor of 1e250 at most.
        normalize: divide each row by the sum of its weights inside [0, M), so that a row with targets sums
            to 1. A row without targets stays zero.
        document_ids: (N,) integers; row i has targets with the same id only. Needs M = N.
            `Window(b - 1, document_ids=torch.arange(N) // b)` makes blocks of b sentences.
        smoothing: a number that is added to all M cells of a row before it is normalised; `weights` are in
            the same units. All candidates become targets then, as of `smoothed`, and a row without
            neighbours uniform. No (N, M) matrix is made.
            `Window(offsets=[1], smoothing=0.1)` is the "smoothing" of the published re-implementation: 1.1
            on the band and 0.1 elsewhere, divided by the row's sum.

    Raises:
        ValueError: `size`, `offsets`, `weights` or `smoothing` out of range, `size` beside `offsets`, or
            document_ids that are not 1-D.
        TypeError: document_ids that are not integers.

    Example:
        >>> import torch, fastqt
        >>> fastqt.Window(1).to_dense(3, 3).tolist()
        [[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.0, 1.0, 0.0]]
        >>> fastqt.Window(offsets=[1]).to_dense(3, 3).tolist()  # the last sentence has no next one
        [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        >>> queries, candidates = torch.randn(2, 8, 16)
        >>> fastqt.contrastive_loss(queries, candidates, fastqt.Window(2, weights=[1, 10, 10, 1])).shape
        torch.Size([])

    Source: Logeswaran and Lee, "An efficient framework for learning sentence representations"
    (2018), section 3.
    """

    def __init__(
        self,
        size: int | None = None,
        *,
        offsets: Sequence[int] | None = None,
        weights: Sequence[float] | None = None,
        normalize: bool = True,
        document_ids: Tensor | None = None,
        smoothing: float | None = None,
    ) -> None:
        if smoothing is not None:
            check_smoothing(smoothing)
        if size is not None and offsets is not None:
            raise ValueError(f"size (context_size): want None beside offsets, got {shown(size)}")

        if offsets is None:
            size = 1 if size is None else size
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"size (context_size): want an integer >= 1, got {shown(size)}")
            distinct: tuple[int, ...] = ()
            self._size, count = size, 2 * size
        else:
            distinct = _checked_offsets(offsets)
            self._size, count = 0, len(distinct)

        self._offsets = distinct
        self._count = count

        # Beside smoothing no row's sum is 0, and `smoothed_rows` lets none overflow.
        divided = normalize and smoothing is None
        self._weights = None if weights is None else _checked_weights(weights, count, divided)

        self.normalize = normalize
        self._smoothing = None if smoothing is None else float(smoothing)
        self.document_ids = None if document_ids is None else as_ids("document_ids", document_ids)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offsets o, of which row i has the targets i + o."""
        # They are made when they are used: those of a size far beyond the batch do not fit into memory.
        return self._offsets or (*range(-self._size, 0), *range(1, self._size + 1))

    def check(self, N: int, M: int, diagonal: str) -> None:
        self.check_reach(N, M, diagonal)
        if self.document_ids is not None and not self.document_ids.numel() == N == M:
            raise ValueError(
                f"document_ids: want one id for each of N={N} queries, and as many candidates, "
                f"got {self.document_ids.numel()} ids and M={M} candidates"
            )

    def check_reach(self, N: int, M: int, diagonal: str) -> None:
        """Checks the offsets and the diagonal alone, as `check` does."""
        if self._smoothing is not None:
            check_diagonal_of_smoothed(diagonal)

        reach = self._size or max(map(abs, self._offsets))
        if reach >= max(N, M):
            name = "size (context_size)" if self._size else "offsets"
            raise ValueError(
                f"{name}: want a reach of fewer rows than the batch, N={N} queries and M={M} candidates, "
                f"got {reach}; take a smaller one, or a larger batch"
            )

        if 0 in self._offsets and diagonal != "keep":
            raise ValueError(
                f"targets: Window has offset 0, on the diagonal that diagonal={diagonal!r} replaces; "
                "use diagonal='keep'"
            )

    def kind(self) -> str:
        kind = "Window" if self._smoothing is None else f"Window smoothed by {self._smoothing}"
        return kind if self.document_ids is None else f"{kind} of document_ids"

    def check_queries(self, n: int) -> None:
        if self.document_ids is not None and self.document_ids.numel() != n:
            raise ValueError(
                f"document_ids: want one id for each of the {n} queries, got {self.document_ids.numel()}"
            )

    def of_shard(self, shard: ShardRows) -> Targets:
        ids = self.document_ids
        return _WindowOfShard(self, shard, None if ids is None else shard.gather(ids))

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        if self.document_ids is not None or not self._is_cached(N):
            return self._lowered_rows(N, M, device, document_ids=self.document_ids)
        return cache.CACHED.rows(self._key(), self._lowered_rows, N, M, device)

    def rows_from(
        self,
        first: int,
        N: int,
        M: int,
        within: tuple[int, int],
        document_ids: Tensor | None,
        device: torch.device,
    ) -> TargetRows:
        """The rows of N queries from the one of index `first` on.

        `within` are the first and the last candidate, exclusive, that can be targets, and `document_ids`
        those of all queries, of which there are as many as candidates.
        """
        lower = partial(self._lowered_rows, first=first, within=within, document_ids=document_ids)
        if document_ids is not None or not self._is_cached(N):
            return lower(N, M, device)
        return cache.CACHED.rows((*self._key(), first, within), lower, N, M, device)

    def _is_cached(self, N: int) -> bool:
        """Whether the rows of N queries are kept. The cache knows no constants of all cells."""
        return self._smoothing is None and N * self._count <= cache.MOST_ENTRIES

    def _key(self) -> tuple[Hashable, ...]:
        """What tells windows without document_ids from each other."""
        return Window, self._size, self._offsets, self._weights, self.normalize

    def _lowered_rows(
        self,
        N: int,
        M: int,
        device: torch.device,
        first: int = 0,
        within: tuple[int, int] | None = None,
        document_ids: Tensor | None = None,
    ) -> TargetRows:
        row, offsets = torch.arange(first, first + N, device=device), self.offsets

        # Python numbers reach a GPU as kernel arguments. A tensor of the offsets or weights would have to be
        # copied from the host first, and the host would wait for that copy.
        columns = torch.stack([row + offset for offset in offsets], 1)
        of_first_row = columns[0].clone()

        low, high = within or (0, M)
        valid = (columns >= low) & (columns < high)
        # A column that is clamped into range may repeat another target of the row, so its weight becomes 0.
        columns = columns.clamp(0, M - 1)

        if document_ids is not None:
            ids = document_ids.to(device)
            valid = valid & (ids[columns] == ids[row][:, None])
        offset_weights = self._weights or (1.0,) * self._count
        dtype = accumulation_dtype(device)
        weights = torch.stack([valid[:, k].to(dtype) * weight for k, weight in enumerate(offset_weights)], 1)

        if self._smoothing is not None:
            rows = rows_of_equal_length(columns, weights)
            return smoothed_rows(rows, N, M, self._smoothing, self.normalize)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(dtype).tiny)
        return replace(rows_of_equal_length(columns, weights), offsets=of_first_row)


class _WindowOfShard(Targets):
    """The rows of a window that one of several processes holds."""

    def __init__(self, window: Window, shard: ShardRows, document_ids: Tensor | None) -> None:
        self.window, self.shard, self.document_ids = window, shard, document_ids

    def check(self, N: int, M: int, diagonal: str) -> None:
        self.window.check_reach(self.shard.N, M, diagonal)
        ids = self.document_ids
        if ids is not None and not ids.numel() == self.shard.N == M:
            raise ValueError(
                f"document_ids: want one id for each query of this rank, and as many candidates, got "
                f"{ids.numel()} ids on all ranks for {self.shard.N} queries and {M} candidates"
            )

    def rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        first, within = self.shard.first, self.shard.window
        return self.window.rows_from(first, N, M, within, self.document_ids, device)


def _checked_offsets(offsets: Sequence[int]) -> tuple[int, ...]:
    if not offsets or len(set(offsets)) != len(offsets) or not all(isinstance(o, int) for o in offsets):
        raise ValueError(f"offsets: want distinct integers, at least one, got {list(offsets)!r}")
    return tuple(offsets)


def _checked_weights(weights: Sequence[float], count: int, normalize: bool) -> tuple[float, ...]:
    if len(weights) != count or not all(
        isinstance(w, Real) and 0 < w <= sys.float_info.max and float(w) > 0 for w in weights
    ):
        raise ValueError(
            f"weights: want one positive number for each of {count} offsets, got {list(weights)!r}"
        )
    floats = tuple(map(float, weights))
    if not normalize:
        return floats
    # The sum of a row must not overflow, and at an edge the least weight may be the only one of its row.
    least, greatest = min(floats), max(floats)
    if least / greatest < LEAST_SHARE:
        raise ValueError(
            f"weights: want a ratio of at least {LEAST_SHARE} to each other, got {least} and {greatest}"
        )
    _, exponent = math.frexp(greatest)
    return tuple(math.ldexp(w, -exponent) for w in floats)
