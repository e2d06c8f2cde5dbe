"""Negatives that are made from the candidates at hand."""

from __future__ import annotations

from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import as_ids, require


class Mixed:
    """One hard negative a row: a mixture of its own candidate and another's, at norm 1.

    Row i's negative is normalise(mix * g_i + (1 - mix) * g_j) with j = partners[i], of the candidates as they
    are scored. No gradient flows through it to the candidates. The "triton" backend never writes it.

    Args:
        mix: the share of the row's own candidate, 0 <= mix <= 1.
        partners: (N,) integers in [0, M); by default the next row's candidate, the first one's for the last.

    Source: Zhang et al., "Unsupervised Sentence Representation via Contrastive Learning with Mixing
    Negatives" (AAAI 2022).
    """

    mix: float
    partners: Tensor | None

    def __init__(self, mix: float = 0.2, partners: Tensor | None = None) -> None:
        if isinstance(mix, bool) or not isinstance(mix, Real) or not 0 <= mix <= 1:
            raise ValueError(f"mix: want a number in 0..1, got {mix!r}")
        self.mix = float(mix)
        self.partners = None if partners is None else as_ids("partners", partners)

    def partners_of(self, N: int, M: int, device: torch.device) -> Tensor:
        """The second candidate of each row, (N,) int64."""
        if N > M:
            raise ValueError(f"row_negatives: Mixed wants a candidate for each of N={N} queries, got M={M}")
        if self.partners is None:
            return torch.arange(1, N + 1, device=device).remainder(N)
        if self.partners.numel() != N:
            raise ValueError(f"partners: want one for each of N={N} queries, got {self.partners.numel()}")
        partners = self.partners.to(device)
        inside = (partners >= 0) & (partners < M)
        require(inside.all(), f"partners: want values in 0..{M - 1}, the candidates", partners)
        return partners


def mixed_rows(candidates: Tensor, mix: float, partners: Tensor) -> Tensor:
    """The negatives (N, D) written out."""
    candidates = candidates.detach()
    return F.normalize(mix * candidates[: len(partners)] + (1 - mix) * candidates[partners], dim=1)
