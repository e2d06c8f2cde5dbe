"""SigLIP: for every pair of rows, whether they have the same index."""

from __future__ import annotations

from torch import Tensor

from fastqt.checks import check_embeddings, check_paired
from fastqt.distributed.group import GroupLike, as_group
from fastqt.distributed.local import local_rows, with_a_row
from fastqt.distributed.public import public_loss
from fastqt.functional import sigmoid_loss
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Reduction
from fastqt.targets import Pairs


@public_loss
def siglip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    bias: float | Tensor,
    normalize: bool = True,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Binary cross-entropy of every pair of rows, whose label is whether they have the same index.

    The loss of a row of a is the sum over all rows of b.

    Args:
        a, b: (N, D), (M, D) with M >= N; rows of equal index are a pair.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        bias: added to all scores, a number or 0-d tensor (differentiable).
        normalize: score by cosine.
        reduction: "mean" over all rows, "sum", or "none".
        matryoshka, memory, backend, group: as of `sigmoid_loss`.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> images, texts = torch.randn(2, 8, 16)
        >>> fastqt.siglip_loss(images, texts, scale=10.0, bias=-10.0, reduction="none").shape
        torch.Size([8])
        >>> round(fastqt.siglip_loss(torch.eye(2), torch.eye(2), scale=10.0, bias=-10.0).item(), 4)
        0.6932

    Source: Zhai et al., "Sigmoid loss for language image pre-training" (2023).
    """
    # In errors the names are those of this loss.
    ranks = as_group(group) if group else None
    rows = {name: local_rows(ranks, name, x) for name, x in (("a", a), ("b", b))}
    check_embeddings(**{name: with_a_row(ranks, x) for name, x in rows.items()})
    if ranks is None:
        check_paired("a", len(a), "b", len(b))
    return sigmoid_loss(
        a,
        b,
        Pairs(),
        scale=scale,
        bias=bias,
        normalize=normalize,
        matryoshka=matryoshka,
        reduction=reduction,
        memory=memory,
        backend=backend,
        group=group,
    )
