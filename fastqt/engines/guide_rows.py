"""Which candidates a guide finds too similar to a query, a tile of scores at a time.

A guide's scores are summed in float64 and compared in float32 (`Guide`). On a CPU they are first summed in
float32, which is several times as fast. A sum of E products is off by E roundings at most, and where that may
decide, an operator of the extension sums in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import has_float64
from fastqt.engines import ops, own_products
from fastqt.exclusions.guide import scorable
from fastqt.norms import LEAST_NORM

ROUNDING = torch.finfo(torch.float32).eps / 2  # of a result in float32, relative to it
LEAST = torch.finfo(torch.float32).tiny  # below which results may be rounded to 0
MORE_ROUNDINGS = 8  # those of factors, of their products, and of the comparison


class GuideRows:
    """Some rows of a guide's queries, whose scores with blocks of candidates are compared with thresholds.

    Args:
        queries: (n, E) the guide's embeddings.
        thresholds: (n,) float32.
        normalize: whether scores are cosines.
    """

    def __init__(self, queries: Tensor, thresholds: Tensor, *, normalize: bool) -> None:
        self.thresholds, self.normalize = thresholds, normalize
        self.in_float32 = (
            ops.native_error is None
            and queries.is_cpu
            and queries.dtype is not torch.float64
            and has_float64(queries.device)
            and own_products.add_in_float32()
        )
        self.queries = _readable(queries) if self.in_float32 else scorable(queries, normalize)
        if self.in_float32:
            self.factors, self.lengths = _factors(queries, normalize)

    def write_above(self, mask: Tensor, candidates: Tensor) -> None:
        """Writes to `mask` (n, m) which scores with candidates (m, E) are above their rows' thresholds."""
        if not self.in_float32:
            scores = (self.queries @ scorable(candidates, self.normalize).T).float()
            torch.gt(scores, self.thresholds[:, None], out=mask)
            return

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
    norms = torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    factors = 1 / norms.clamp(min=LEAST_NORM) if normalize else torch.ones_like(norms)
    return factors, factors * norms
