"""SimCSE: each sentence is to find its second view among all second views and hard negatives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_embeddings, check_number, check_option
from fastqt.losses.common import log_sum_exp, scores, unit
from fastqt.losses.info_nce import info_nce_loss
from fastqt.problem import REDUCTIONS, reduce


def simcse_loss(
    z1: Tensor,
    z2: Tensor,
    z3: Tensor | None = None,
    *,
    scale: float | Tensor = 20.0,
    hard_negative_weight: float = 0.0,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of each sentence with its second view by cosine, among all second views.

    Args:
        z1, z2: (N, D) two views of N sentences, such as two passes under dropout.
        z3: (N, D) a hard negative for each sentence, and a further candidate for all others.
        scale: inverse temperature 1 / tau.
        hard_negative_weight: added to the score of a sentence with its own hard negative. A weight other
            than 0 takes eight matrix products of N x N x D in place of six.
        reduction, memory, backend: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Gao, Yao and Chen, "SimCSE: Simple contrastive learning of sentence embeddings" (2021).
    """
    check_embeddings(z1=z1, z2=z2, z3=z3)
    check_number("hard_negative_weight", hard_negative_weight)
    check_option("reduction", reduction, REDUCTIONS)
    if z3 is not None and len(z3) != len(z1):
        raise ValueError(f"z3: want a hard negative for each of N={len(z1)} sentences, got {len(z3)}")
    if z3 is None or hard_negative_weight == 0:
        return info_nce_loss(
            z1, z2, scale=scale, negatives=z3, reduction=reduction, memory=memory, backend=backend
        )
    options: dict[str, Any] = {"scale": scale, "memory": memory, "backend": backend}
    z1, z2, z3 = (unit(z) for z in (z1, z2, z3))
    own = torch.arange(len(z1), device=z1.device)
    positive = info_nce_loss(z1, z2, normalize=False, reduction="none", **options)
    hard = log_sum_exp(z1, z3, own, hard_negative_weight, "keep", **options)
    return reduce(torch.logaddexp(positive, hard - scores(z1, z2, scale)), reduction)
