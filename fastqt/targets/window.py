"""The window of neighbouring sentences, and a cache of the small windows that training lowers every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from numbers import Real

import torch
from torch import Tensor

from fastqt.checks import as_ids
from fastqt.targets.base import TargetRows, Targets, rows_of_equal_length

# Lowering the window of a small batch takes longer than computing the batch's scores, and training asks for
# the same window at every step. Windows of at most so many entries are therefore cached.
_BAND_CACHE_SIZE = 8
_BAND_CACHE_ENTRIES = 2**16

_band_cache: dict[tuple[object, ...], TargetRows] = {}
# Rows that a CUDA graph reads, by id(). They are never freed, because the graph may be replayed at any time.
_captured_bands: dict[int, TargetRows] = {}


class Window(Targets):
    """Neighbours at fixed offsets: the targets of row i are the candidates i + o inside [0, M).

    Args:
        size: half-width k >= 1; the offsets are -k..k without 0. The "context size 3" of QuickThoughts is
            k = 1.
        offsets: explicit offsets in place of `size`, e.g. [1] for the next sentence only.
        weights: one positive weight for each offset; 1 by default.
        normalize: divide each row by the sum of its weights inside [0, M), so that a row with targets sums
            to 1. A row without targets stays zero.
        document_ids: (N,) integers; row i has targets with the same id only. Needs M = N.
            `Window(b - 1, document_ids=torch.arange(N) // b)` makes blocks of b sentences.

    Raises:
        ValueError: `size`, `offsets` or `weights` out of range, or document_ids that are not 1-D.
        TypeError: document_ids that are not integers.

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
        return self._lowered_rows(N, M, device)

    def _cached_rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        if torch.compiler.is_compiling():
            return self._lowered_rows(N, M, device)
        key = (N, M, self.offsets, self.weights, self.normalize, device)
        rows = _band_cache.get(key)
        if _is_being_captured(device):
            # Tensors made during a capture live in the graph's memory pool, so they must not enter the
            # cache. Cached tensors that the graph reads must outlive it.
            if rows is None:
                return self._lowered_rows(N, M, device)
            _captured_bands[id(rows)] = rows
        if rows is None:
            # A later call may save these tensors for backward, which inference tensors do not allow.
            with torch.inference_mode(False):
                rows = self._lowered_rows(N, M, device)
            if type(rows.columns) is Tensor:  # a tracer's fake tensors must not be cached
                while len(_band_cache) >= _BAND_CACHE_SIZE:
                    _band_cache.pop(next(iter(_band_cache)), None)
                _band_cache[key] = rows
        return rows

    def _lowered_rows(self, N: int, M: int, device: torch.device) -> TargetRows:
        row = torch.arange(N, device=device)
        # Python numbers reach a GPU as kernel arguments. A tensor of the offsets or weights would have to be
        # copied from the host first, and the host would wait for that copy.
        columns = torch.stack([row + offset for offset in self.offsets], 1)
        valid = (columns >= 0) & (columns < M)
        # A column that is clamped into range may repeat another target of the row, so its weight becomes 0.
        columns = columns.clamp(0, M - 1)
        if self.document_ids is not None:
            ids = self.document_ids.to(device)
            valid = valid & (ids[columns] == ids[:, None])
        weights = torch.stack([valid[:, k].double() * weight for k, weight in enumerate(self.weights)], 1)
        if self.normalize:
            weights = weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        return replace(rows_of_equal_length(columns, weights), offsets=self.offsets)


def _is_being_captured(device: torch.device) -> bool:
    """Whether kernels launched on `device` now are recorded into a CUDA graph."""
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
