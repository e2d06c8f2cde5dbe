"""SigLIP: for every pair of rows, whether they have the same index."""

from __future__ import annotations

from torch import Tensor

from fastqt.arguments import Number, PairedRows, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import ExcludeLike
from fastqt.functional import sigmoid_loss
from fastqt.loss import Arguments, loss
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Reduction
from fastqt.targets import Pairs


@loss("SigLIPLoss", sums_prefixes=False)
def siglip_loss(
    call: Arguments,
    a: Rows,
    b: PairedRows,
    *,
    scale: Scale,
    bias: Number,
    normalize: bool = True,
    exclude: ExcludeLike | None = None,
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
        exclude, matryoshka, memory, backend, group: as of `sigmoid_loss`.

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
    return call.to(
        sigmoid_loss, {"rows": "rows", "candidates": "b"}, queries=a, candidates=b, targets=Pairs()
    )
