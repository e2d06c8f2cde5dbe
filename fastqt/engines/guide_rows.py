"""Which candidates a guide finds too similar to a query, a tile of scores at a time.

A guide's scores are summed in float64 and compared in float32 (`Guide`). On a CPU they are first summed in
float32, which is several times as fast. A sum of E products is off by E roundings at most, and where that may
decide, an operator of the extension sums in float64. On a GPU they are first summed by tensor cores, and a
kernel of Triton's does the rest (`engines.triton.guide`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from fastqt.devices import has_float64
from fastqt.engines import has_kernels_for, ops, own_products
from fastqt.engines.triton import guide as kernels
from fastqt.exclusions.guide import Guide, factors_and_norms, scorable
from fastqt.norms import LEAST_NORM

ROUNDING = torch.finfo(torch.float32).eps / 2  # of a result in float32, relative to it
LEAST = torch.finfo(torch.float32).tiny  # below which results may be rounded to 0
MORE_ROUNDINGS = 8  # those of factors, of their products, and of the comparison


class GuideRows(Protocol):
    """Some rows of a guide's queries, whose scores with blocks of candidates are compared with thresholds."""

    cell_bytes: int  # of a tile of scores

    def write_above(self, mask: Tensor, candidates: Tensor) -> None:
        """Writes to `mask` (n, m) which scores with candidates (m, E) are above their rows' thresholds."""


def guide_rows(
    queries: Tensor, thresholds: Tensor, *, normalize: bool, in_plain_torch: bool = False
) -> GuideRows:
    """Some rows of a guide, as their device compares them the fastest.

    Args:
        queries: (n, E) the guide's embeddings.
        thresholds: (n,) float32, contiguous.
        normalize: whether scores are cosines.
        in_plain_torch: whether they are compared in torch's operations alone.
    """
    if in_plain_torch:
        return InFloat64(queries, thresholds, normalize=normalize)
    if kernels.takes(queries.dtype) and has_kernels_for(queries, queries.dtype):
        return kernels.GuideKernels(queries, thresholds, normalize=normalize)

    in_float32 = (
        ops.native_error is None
        and queries.is_cpu
        and queries.dtype is not torch.float64
        and has_float64(queries.device)
        and own_products.add_in_float32()
    )
    rows = InFloat32 if in_float32 else InFloat64
    return rows(queries, thresholds, normalize=normalize)


def guide_masks(guide: Guide) -> tuple[Tensor, Tensor]:
    """The cells of pairs that a guide takes out of their rows, and those that it takes out of their columns.

    (N, N) bool each. On a GPU one product serves both.
    """
    rows, columns = (
        guide_rows(x.queries, x.row_thresholds(), normalize=x.normalize) for x in (guide, guide.turned())
    )
    if isinstance(rows, kernels.GuideKernels) and isinstance(columns, kernels.GuideKernels):
        return rows.masks_both_ways(columns)
    of_rows, of_columns = (
        guide.queries.new_empty(2 * (len(guide.queries),), dtype=torch.bool) for _ in range(2)
    )
    rows.write_above(of_rows, guide.candidates)
    columns.write_above(of_columns, guide.queries)
    return of_rows, of_columns.T.contiguous()


class InFloat64:
    """All scores are summed in float64, or in float32 on a device that has no float64."""

    cell_bytes = 16  # float64, float32, and what is compared

    def __init__(self, queries: Tensor, thresholds: Tensor, *, normalize: bool) -> None:
        self.queries, self.thresholds, self.normalize = scorable(queries, normalize), thresholds, normalize

    def write_above(self, mask: Tensor, candidates: Tensor) -> None:
        scores = (self.queries @ scorable(candidates, self.normalize).T).float()
        torch.gt(scores, self.thresholds[:, None], out=mask)


class InFloat32:
    """On a CPU scores are summed in float32, and in float64 where their error may decide."""

    cell_bytes = 16

    def __init__(self, queries: Tensor, thresholds: Tensor, *, normalize: bool) -> None:
        self.queries, self.thresholds, self.normalize = _readable(queries), thresholds, normalize
        self.factors, self.lengths = _factors(self.queries, normalize)

    def write_above(self, mask: Tensor, candidates: Tensor) -> None:
        candidates = _readable(candidates)
        factors, lengths = _factors(candidates, self.normalize)
        roundings = self.queries.shape[1] + MORE_ROUNDINGS
        errors = 1.01 * roundings * ROUNDING * lengths.amax() * self.lengths
        errors += roundings * LEAST * factors.amax() * self.factors
        torch.ops.fastqt.above_thresholds_(
            mask,
            own_products.product(self.queries, candidates.T),
            self.queries,
            candidates,
            self.factors.float(),
            factors.float(),
            self.thresholds,
            errors.float(),
            self.normalize,
            LEAST_NORM,
        )


def _readable(x: Tensor) -> Tensor:
    """Embeddings as the operator reads them, in float32 and with adjacent columns."""
    x = x.float()
    return x if x.stride(1) == 1 else x.contiguous()


def _factors(x: Tensor, normalize: bool) -> tuple[Tensor, Tensor]:
    """What products with rows (n, E) are multiplied by for scores, and the norms that they then have."""
    factors, norms = factors_and_norms(x, normalize)
    return factors, factors * norms
