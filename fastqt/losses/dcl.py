"""Decoupled contrastive learning: a row's positive leaves the denominator of its softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.arguments import Positive, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.pair_scores import PairIds, PairScores, two_views
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import loss_dtype


@loss("DCLLoss")
def dcl_loss(
    call: Arguments,
    z1: Rows,
    z2: Rows,
    *,
    scale: Scale = 10.0,
    sigma: Positive | None = None,
    exclude: PairIds = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """The decoupled loss of two views: a logsumexp over negatives alone, less the score of the pair.

    With cosines times the scale as scores S, a view's loss is log sum_n exp(S_n) - w S_p, where p is the
    other view of its sentence and n are both views of all other sentences. The positive is not among them, so
    that an easy one does not make the gradient small. A loss may be less than 0.

    Args:
        z1, z2: (N, D) two views of N sentences or images, at least 2.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        sigma: None for w = 1; otherwise a number > 0, the temperature of the weights of DCLW. Then w is
            2 - exp(c / sigma) / mean exp(c / sigma), where c is the pair's cosine and the mean is over all
            pairs: far pairs count more. No gradient flows through the weights.
        exclude: filters by ids, as of `contrastive_loss`, between any two views. A sentence without negatives
            has a loss of -inf then.
        reduction: "mean" over all sentences, each of which has the mean of its two views; "sum", or "none".
        memory, backend, group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> fastqt.dcl_loss(z1, z2, scale=1 / 0.1).shape  # a temperature of 0.1
        torch.Size([])
        >>> round(fastqt.dcl_loss(torch.eye(4), torch.eye(4), scale=1.0).item(), 4)  # log 6 - 1
        0.7918

    Source: Yeh et al., "Decoupled contrastive learning" (2022), eq. 6 and 7.
    """
    views = two_views(call, z1, z2)
    with call.batch.leaving_word():
        positive, of_first, of_second = views.of_views()
        weights = 1.0 if sigma is None else _weights(views, sigma)
        losses = (of_first + of_second) / 2 - weights * positive
    return call.batch.reduced(losses, reduction).to(loss_dtype(z1))


def _weights(views: PairScores, sigma: float) -> Tensor:
    """What the score of each pair is multiplied by, (n,)."""
    first, second = (x.detach().to(loss_dtype(x)) for x in views.local.values())
    logits = (first * second).sum(1) / sigma
    every = views.batch.gather_constant(logits)
    return 2 - views.batch.total() * (logits - torch.logsumexp(every, 0)).exp()
