"""SigLIP: for every pair of rows, whether they have the same index."""

from __future__ import annotations

from torch import Tensor

from fastqt.checks import check_embeddings, check_paired
from fastqt.distributed.group import GroupLike
from fastqt.functional import sigmoid_loss
from fastqt.targets import Diagonal, Pairs


def siglip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    bias: float | Tensor,
    normalize: bool = True,
    reduction: str = "mean",
    memory: str | int = "fast",
    backend: str | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Binary cross-entropy of every pair of rows, whose label is whether they have the same index.

    The loss of a row of a is the sum over all rows of b.

    Args:
        a, b: (N, D), (M, D) with M >= N; rows of equal index are a pair.
        scale: inverse temperature, a number or 0-d tensor (differentiable).
        bias: added to all scores, a number or 0-d tensor (differentiable).
        normalize: score by cosine.
        reduction, memory, backend, group: as of `sigmoid_loss`.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: Zhai et al., "Sigmoid loss for language image pre-training" (2023).
    """
    if group is None:
        check_embeddings(a=a, b=b)
        check_paired("a", a.shape[0], "b", b.shape[0])
    return sigmoid_loss(
        a,
        b,
        Diagonal() if group is None else Pairs(),
        scale=scale,
        bias=bias,
        normalize=normalize,
        reduction=reduction,
        memory=memory,
        backend=backend,
        group=group,
    )
