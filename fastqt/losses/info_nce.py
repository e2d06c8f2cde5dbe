"""InfoNCE: each query's own candidate among all candidates."""

from __future__ import annotations

from torch import Tensor

from fastqt.distributed.group import GroupLike
from fastqt.functional import contrastive_loss
from fastqt.targets import Pairs


def info_nce_loss(
    queries: Tensor,
    candidates: Tensor,
    *,
    scale: float | Tensor = 20.0,
    normalize: bool = True,
    negatives: Tensor | None = None,
    similarity: str = "dot",
    reduction: str = "mean",
    memory: str | int = "fast",
    backend: str | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each query with its own candidate, among all candidates.

    Args:
        queries: (N, D) floating point.
        candidates: (M, D), M >= N; candidate i belongs to query i.
        scale: inverse temperature, a number or 0-d tensor (differentiable).
        normalize: score by cosine.
        negatives: (K, D) further candidates, which belong to no query.
        similarity: "dot", or "euclidean": minus the squared distance, as of `contrastive_loss`.
        reduction, memory, backend, group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: van den Oord et al., "Representation learning with contrastive predictive coding" (2018).
    """
    return contrastive_loss(
        queries,
        candidates,
        Pairs(),
        diagonal="keep",
        scale=scale,
        normalize=normalize,
        negatives=negatives,
        similarity=similarity,
        reduction=reduction,
        memory=memory,
        backend=backend,
        group=group,
    )
