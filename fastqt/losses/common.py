"""Functions that several losses of the family share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.targets import Window


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


def row_numbers(n: int, device: torch.device) -> Tensor:
    return torch.arange(n, device=device)


def random_order(n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """All rows in a random order, where each has the next one for a partner: nobody their own."""
    return torch.randperm(n, generator=generator, device=device_of(generator, device)).to(device)


def check_window(queries: Tensor, context_size: int, document_ids: Tensor | None) -> None:
    """Raises ValueError or TypeError unless these are the window of so many rows."""
    Window(context_size, document_ids=document_ids).check_queries(queries.shape[0])


def device_of(generator: torch.Generator | None, device: torch.device) -> torch.device:
    return device if generator is None else generator.device
