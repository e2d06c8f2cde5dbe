"""Debiasing: among the negatives of a row are, unseen, some of its positives, and their share is estimated.

With the score p of a row's positive and the scores o of its N' negatives, the sum R of all exp(o) stands in a
softmax for what is expected of true negatives alone, whose scores are cosines times the scale:

    G = max((R - tau_plus N' exp(p)) / (1 - tau_plus), N' exp(-scale))

Source: Chuang et al., "Debiased contrastive learning" (2020), eq. 7 and 8.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor

from fastqt.arguments import Argument, Known, ShareBelow1, argument_of
from fastqt.checks import FLOATING, check_tensor, require
from fastqt.devices import accumulation_dtype
from fastqt.functional.row_cells import joined

LEAST_SCALE = 1e-30  # of scores that are all 0, of cells that are compared as they are

_SHARE = argument_of(ShareBelow1)


def _check(name: str, value: Any, known: Known) -> Any:
    if not isinstance(value, Tensor):
        assert _SHARE.check is not None
        return _SHARE.check(name, value, known)
    check_tensor(name, value)
    if known.device is None:
        raise TypeError(f"{name}: want a number when the module is made; the function takes one for each row")
    wanted = known.sizes["rows"]
    if value.dtype not in FLOATING or tuple(value.shape) != (wanted,):
        raise ValueError(
            f"{name}: want a number, or ({wanted},) numbers of floating point of 16 to 64 bits, "
            f"got shape {tuple(value.shape)} of {value.dtype}"
        )
    if known.device != value.device:
        raise ValueError(f"{name}: want device {known.device} as {known.first}, got {value.device}")
    value = value.detach()
    require(((value >= 0) & (value < 1)).all(), f"{name}: want numbers of 0 <= {name} < 1")
    return value


def _alike(value: Any) -> Any:
    return "of each row" if isinstance(value, Tensor) else float(value)


# The share of a row's negatives that are expected to be positives.
Prior: TypeAlias = Annotated[float | Tensor, Argument(_check, _alike, is_local=True)]


def is_debiased(tau_plus: float | Tensor) -> bool:
    return isinstance(tau_plus, Tensor) or tau_plus != 0


def fit_prior(tau_plus: float | Tensor, normalize: bool) -> None:
    """Raises ValueError for scores that are no cosines, which may be less than -scale."""
    if is_debiased(tau_plus) and not normalize:
        raise ValueError("tau_plus: want 0 with normalize=False, since it is of cosines")


def log_of_count(count: int | Tensor, device: torch.device) -> Tensor:
    """The logarithm of a number of negatives, ()."""
    dtype = accumulation_dtype(device)
    if isinstance(count, Tensor):
        return count.to(dtype).log()
    # A tensor, because a tracer would make a graph for each logarithm of a number of rows.
    return torch.full((), count, dtype=dtype, device=device).log()


def debiased(
    positive: Tensor,
    others: Sequence[Tensor],
    log_counts: Sequence[Tensor],
    tau_plus: float | Tensor,
    scale: float | Tensor,
) -> Tensor:
    """The logarithm of G of each row, (n,).

    Args:
        positive: the scores of the positives, (n,).
        others: the logsumexps of disjoint sets of negatives, (n,) each.
        log_counts: the logarithms of how many negatives these are, (n,) or () each.
        tau_plus: a number, or (n,).
        scale: of the scores.
    """
    log_sum = joined(torch.stack(list(others), 1))
    log_count = torch.stack(list(log_counts)).logsumexp(0)
    log_prior, log_rest = _logarithms(tau_plus, log_sum)
    # log(R - tau_plus N' exp p) - log(1 - tau_plus); minus infinity where no more than that is left.
    taken = positive + log_prior + log_count - log_sum
    remains = taken < 0
    share = torch.where(remains, taken, -1.0)
    log_true = log_sum + torch.log(-torch.expm1(share)) - log_rest
    log_true = log_true.masked_fill(~remains & ~taken.isnan(), -math.inf)
    least = log_count - (scale.to(log_sum) if isinstance(scale, Tensor) else scale)
    return torch.maximum(log_true, least)


def _logarithms(tau_plus: float | Tensor, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
    """log tau_plus and log(1 - tau_plus)."""
    if isinstance(tau_plus, Tensor):
        prior = tau_plus.to(like)
        return prior.log(), torch.log1p(-prior)
    return (math.log(tau_plus) if tau_plus else -math.inf), math.log1p(-tau_plus)
