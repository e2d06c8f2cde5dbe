"""SimCSE: each sentence is to find its second view among all second views and hard negatives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastqt.checks import check_embeddings, check_number, check_option, check_paired, check_scale
from fastqt.functional import log_sum_exp
from fastqt.losses.common import joined_loss, scores
from fastqt.losses.info_nce import info_nce_loss
from fastqt.problem import REDUCTIONS, reduce, unit_rows


def simcse_loss(
    z1: Tensor,
    z2: Tensor,
    z3: Tensor | None = None,
    *,
    scale: float | Tensor = 20.0,
    hard_negative_weight: float = 0.0,
    reduction: str = "mean",
    memory: str | int = "fast",
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
    check_embeddings(("z3",), z1=z1, z2=z2, z3=z3)
    check_scale(scale, z1.dtype)
    check_number("hard_negative_weight", hard_negative_weight, dtype=z1.dtype)
    check_option("reduction", reduction, REDUCTIONS)
    check_paired("z1", len(z1), "z2", len(z2))
    if z3 is None and hard_negative_weight != 0:
        raise ValueError(f"hard_negative_weight: want 0 without z3, got {hard_negative_weight}")
    if z3 is not None and len(z3) != len(z1):
        raise ValueError(f"z3: want a hard negative for each of N={len(z1)} sentences, got {len(z3)}")
    if z3 is None or hard_negative_weight == 0:
        return info_nce_loss(
            z1, z2, scale=scale, negatives=z3, reduction=reduction, memory=memory, backend=backend
        )
    options: dict[str, Any] = {"scale": scale, "memory": memory, "backend": backend}
    z1, z2, z3 = (unit_rows(z) for z in (z1, z2, z3))
    others = [log_sum_exp(z1, z, diagonal="exclude", **options) for z in (z2, z3)]
    others.append(scores(z1, z3, scale) + hard_negative_weight)
    return reduce(joined_loss(scores(z1, z2[: len(z1)], scale), others), reduction)
