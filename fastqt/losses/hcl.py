"""Contrastive learning with hard negative samples, whose weights follow from their own scores."""

from __future__ import annotations

import math
from collections.abc import Hashable

import torch
from torch import Tensor

from fastqt.checks import check_number
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.distributed.public import public_loss
from fastqt.losses.common import joined_loss
from fastqt.losses.two_views import two_views, view_sums
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import loss_dtype


@public_loss
def hcl_loss(
    z1: Tensor,
    z2: Tensor,
    *,
    scale: float | Tensor = 2.0,
    beta: float = 1.0,
    tau_plus: float = 0.1,
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

    With beta=0 it is the debiased loss, and with tau_plus=0 too the loss of SimCLR. A beta other than 0 takes
    the scores of a second scale and about twice as long.

    Args:
        z1, z2: (N, D) two views of N sentences or images, at least 2.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        beta: how much near negatives count more, a number >= 0.
        tau_plus: the share of negatives that are expected to be positives, 0 <= tau_plus < 1.
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

    def check() -> dict[str, Hashable]:
        check_beta(beta, z1.dtype)
        check_tau_plus(tau_plus)
        return {"beta": float(beta), "tau_plus": float(tau_plus)}

    views = two_views("fastqt.hcl_loss", z1, z2, check, scale, reduction, memory, backend, group)
    batch, dtype = views.walk.batch, accumulation_dtype(z1.device)
    # A tensor, because a tracer would make a graph for each logarithm of a number of rows.
    log_count = torch.full((), views.negatives, dtype=dtype, device=z1.device).log()
    with batch.leaving_word():
        positive, *sums = view_sums(views, (1 + beta) * scale)
        positive = positive / (1 + beta)
        if beta:
            _, *weights = view_sums(views, beta * scale)
            sums = [x - of_weights + log_count for x, of_weights in zip(sums, weights, strict=True)]
        losses = [joined_loss(positive, [_debiased(positive, x, tau_plus, log_count, scale)]) for x in sums]
    return batch.reduced(torch.stack(losses).mean(0), reduction).to(loss_dtype(z1))


def check_beta(beta: float, dtype: torch.dtype = torch.float64) -> None:
    """Raises ValueError or TypeError unless it is a number >= 0."""
    check_number("beta", beta, dtype=dtype)
    if beta < 0:
        raise ValueError(f"beta: want a number >= 0, got {beta}")


def check_tau_plus(tau_plus: float) -> None:
    """Raises ValueError or TypeError unless it is a number from 0 to less than 1."""
    check_number("tau_plus", tau_plus)
    if not 0 <= tau_plus < 1:
        raise ValueError(f"tau_plus: want 0 <= tau_plus < 1, got {tau_plus}")


def _debiased(
    positive: Tensor, log_sum: Tensor, tau_plus: float, log_count: Tensor, scale: float | Tensor
) -> Tensor:
    """The logarithm of G, (n,), from that of R."""
    if tau_plus:
        # log(R - tau_plus N' exp p) - log(1 - tau_plus); minus infinity where no more than that is left.
        taken = positive + math.log(tau_plus) + log_count - log_sum
        remains = taken < 0
        share = torch.where(remains, taken, -1.0)
        log_sum = log_sum + torch.log(-torch.expm1(share)) - math.log1p(-tau_plus)
        log_sum = log_sum.masked_fill(~remains & ~taken.isnan(), -math.inf)
    least = log_count - (scale.to(log_sum) if isinstance(scale, Tensor) else scale)
    return torch.maximum(log_sum, least)
