"""Functions that several losses of the family share."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.functional import contrastive_loss


def log_sum_exp(
    queries: Tensor,
    candidates: Tensor,
    own: Tensor,  # (N,): one column for each row, not on the diagonal unless that is kept
    weight: float,
    diagonal: str,
    *,
    scale: float | Tensor,
    memory: str,
    backend: str | None,
) -> Tensor:
    """log sum_j exp(s_ij) of each row, (N,), with `weight` added to the score of its own column."""
    less_own = contrastive_loss(
        *(queries, candidates, own),
        diagonal=diagonal,
        scale=scale,
        reduction="none",
        memory=memory,
        backend=backend,
    )
    own_scores = scores(queries, candidates[own], scale)
    # The sum over all columns, relative to the own one, is exp(l) with l = less_own >= 0. The own column
    # counts exp(w) there in place of 1, which gives log(exp(l) + exp(w) - 1).
    return own_scores + less_own + torch.log1p(math.expm1(weight) * torch.exp(-less_own))


def scores(a: Tensor, b: Tensor, scale: float | Tensor) -> Tensor:
    """The scores of rows with rows, (N,)."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return scale * (a.to(dtype) * b.to(dtype)).sum(1)


def unit(x: Tensor) -> Tensor:
    """Rows of norm 1, computed in float32 at least and rounded to the dtype of `x`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return F.normalize(x.to(dtype), dim=1).to(x.dtype)


def row_numbers(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


def random_order(n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """All rows in a random order, where each has the next one for a partner: nobody their own."""
    return torch.randperm(n, generator=generator, device=device_of(generator, device)).to(device)


def device_of(generator: torch.Generator | None, device: torch.device) -> torch.device:
    return device if generator is None else generator.device
