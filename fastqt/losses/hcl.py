"""Contrastive learning with hard negative samples, whose weights follow from their own scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fastqt.arguments import NotNegative, Rows, Scale
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss
from fastqt.losses.debiasing import Prior, debiased, log_of_count
from fastqt.losses.pair_scores import PairIds, PairScores, two_views
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import loss_dtype


@loss("HCLLoss")
def hcl_loss(
    call: Arguments,
    z1: Rows,
    z2: Rows,
    *,
    scale: Scale = 2.0,
    beta: NotNegative = 1.0,
    tau_plus: Prior = 0.1,
    exclude: PairIds = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """The loss of two views in which near negatives count more, and the false ones among them are estimated.

    With cosines times the scale as scores S, a view's loss is -log(exp(S_p) / (exp(S_p) + G)), where p is the
    other view of its sentence. Over the N' = 2 N - 2 views n of all other sentences,

        R = sum_n w_n exp(S_n), where w_n = exp(beta S_n) / mean_n exp(beta S_n),
        G = max((R - tau_plus N' exp(S_p)) / (1 - tau_plus), N' exp(-scale)).

    With beta=0 it is the debiased loss, and with tau_plus=0 too the loss of SimCLR. A beta other than 0 has
    softmaxes of a second scale, which share the products on a CPU, and on a GPU where the memory holds all
    scores, and take twice as long elsewhere.

    Args:
        z1, z2: (N, D) two views of N sentences or images, at least 2.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        beta: how much near negatives count more, a number >= 0.
        tau_plus: the share of negatives that are expected to be positives, 0 <= tau_plus < 1, or (N,) shares,
            one for each sentence.
        exclude: filters by ids, as of `contrastive_loss`, between any two views. N' is the number of the
            negatives that are left.
        reduction: "mean" over all sentences, each of which has the mean of its two views; "sum", or "none".
        memory, backend, group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> z1, z2 = torch.randn(2, 8, 16)
        >>> fastqt.hcl_loss(z1, z2, scale=1 / 0.5).shape  # a temperature of 0.5
        torch.Size([])
        >>> loss = fastqt.hcl_loss(torch.eye(4), torch.eye(4), scale=1.0, beta=0.0, tau_plus=0.0)
        >>> round(loss.item(), 4)  # log(e + 6) - 1
        1.1654

    Source: Robinson et al., "Contrastive learning with hard negative samples" (2021), eq. 4; for beta=0
    Chuang et al., "Debiased contrastive learning" (2020), eq. 7 and 8.
    """
    views, batch = two_views(call, z1, z2), call.batch
    with batch.leaving_word():
        positive, (sums, *weights) = views.of_views_times((1 + beta, beta) if beta else (1.0,))
        counts = _log_counts(views)
        if weights:
            sums = tuple(
                (x - of_weights + count).masked_fill(count == -math.inf, -math.inf)
                for x, of_weights, count in zip(sums, *weights, counts, strict=True)
            )
        losses = [
            joined_loss(positive, [debiased(positive, [x], [count], tau_plus, scale)])
            for x, count in zip(sums, counts, strict=True)
        ]
    return batch.reduced(torch.stack(losses).mean(0), reduction).to(loss_dtype(z1))


def _log_counts(views: PairScores) -> tuple[Tensor, Tensor]:
    """The logarithms of how many negatives the first and the second views have, (n,) or ()."""
    if views.is_filtered:
        _, of_first, of_second = views.of_nothing().of_views()
        return of_first, of_second
    count = log_of_count(2 * views.batch.total() - 2, views.local["query"].device)
    return count, count
