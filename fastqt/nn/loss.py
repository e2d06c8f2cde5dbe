"""The loss as a module, for those who keep their options in one place or learn the scale."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fastqt.checks import check_scale
from fastqt.functional import contrastive_loss
from fastqt.targets import TargetsLike


class ContrastiveLoss(nn.Module):
    """`fastqt.contrastive_loss` with its options fixed.

    Args:
        scale: inverse temperature; a finite number, > 0 if it is learnt.
        learn_scale: make it a parameter, `log_scale`, so that it stays positive.
        **options: `context_size`, `diagonal`, `normalize`, `reduction`, `memory` and `backend` of
            `fastqt.contrastive_loss`.
    """

    log_scale: nn.Parameter | None

    def __init__(self, *, scale: float = 1.0, learn_scale: bool = False, **options: Any) -> None:
        super().__init__()
        unknown = options.keys() - {"context_size", "diagonal", "normalize", "reduction", "memory", "backend"}
        if unknown:
            raise TypeError(f"{', '.join(sorted(unknown))}: no option of ContrastiveLoss")
        if learn_scale and not scale > 0:
            raise ValueError(f"scale: want a positive number to learn from, got {scale}")
        check_scale(scale)
        self.initial_scale = float(scale)
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale))) if learn_scale else None
        self.options = options

    @property
    def scale(self) -> float | Tensor:
        """The inverse temperature in use."""
        return self.initial_scale if self.log_scale is None else self.log_scale.exp()

    def forward(
        self,
        queries: Tensor,  # (N, D)
        candidates: Tensor,  # (M, D)
        targets: TargetsLike | None = None,
        *,
        document_ids: Tensor | None = None,
        negatives: Tensor | None = None,
        row_negatives: Tensor | None = None,
        query_groups: Tensor | None = None,
        candidate_groups: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        """The loss; see `fastqt.contrastive_loss` for the arguments and errors."""
        return contrastive_loss(
            queries,
            candidates,
            targets,
            document_ids=document_ids,
            negatives=negatives,
            row_negatives=row_negatives,
            query_groups=query_groups,
            candidate_groups=candidate_groups,
            mask=mask,
            scale=self.scale,
            **self.options,
        )

    def extra_repr(self) -> str:
        learnt = ", learn_scale=True" if self.log_scale is not None else ""
        return f"scale={self.initial_scale}{learnt}" + "".join(
            f", {k}={v!r}" for k, v in self.options.items()
        )
