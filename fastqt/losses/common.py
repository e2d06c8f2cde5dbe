"""Functions that several losses of the family share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.functional.false_negatives import threshold_of
from fastqt.problem import loss_dtype


def joined_loss(positive: Tensor, others: Sequence[Tensor], copies: int = 1) -> Tensor:
    """Cross-entropy of each row with its positive, among the positive and several sets of other cells, (N,).

    The others are the logsumexps of disjoint sets of cells without the positive, or single scores, (N,) each;
    the positive is `copies` times among the cells. The loss keeps its digits when the positive outweighs all
    others, and when one of the others does.
    """
    dtype = accumulation_dtype(positive.device)
    # Of minus infinity alone, the logsumexp of no cells, torch's logsumexp has NaN for a gradient.
    no_cells = torch.finfo(dtype).min / 1024
    most = torch.stack([x.to(dtype).clamp(min=no_cells) for x in others]).logsumexp(0)
    # log(copies exp p + exp o) - p, with the constant part apart.
    constant = math.log(copies)
    exact = positive.to(dtype)
    # In log(exp p + exp o) - p two infinities cancel each other where p is infinite, as 0 * p says: NaN.
    lead = most - exact - constant + 0 * exact
    loss = F.softplus(lead, threshold=50) + constant
    return loss.to(positive.dtype)


def scores(a: Tensor, b: Tensor, scale: float | Tensor) -> Tensor:
    """The scores of rows with rows, (N,)."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    return scale * (a.to(dtype) * b.to(dtype)).sum(1)


def similarity_thresholds(
    queries: Tensor, positives: Tensor, margin: float | None, strategy: str
) -> Tensor | None:
    """What similarities of each row are compared with, (n,), for a margin above that of its positive."""
    if margin is None:
        return None
    a, b = (x.detach().to(loss_dtype(x)) for x in (queries, positives))
    norms = torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)
    return threshold_of(scores(a, b, 1.0), norms, queries.shape[1], margin, strategy)


def filtered_scores(a: Tensor, b: Tensor, scale: float | Tensor, thresholds: Tensor | None) -> Tensor:
    """The scores of rows with rows, (N,); minus infinity where their similarities are above thresholds."""
    if thresholds is None:
        return scores(a, b, scale)
    above = scores(a.detach(), b.detach(), 1.0) > thresholds
    return scores(a, b, scale).masked_fill(above, -torch.inf)


def row_numbers(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


def random_order(n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """All rows in a random order, where each has the next one for a partner: nobody their own."""
    return torch.randperm(n, generator=generator, device=device_of(generator, device)).to(device)


def check_generator(generator: object) -> None:
    """Raises TypeError unless it is a generator or None. One is taken where nothing is drawn, too."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: want a torch.Generator or None, got {type(generator).__name__}")


def device_of(generator: torch.Generator | None, device: torch.device) -> torch.device:
    return device if generator is None else generator.device
