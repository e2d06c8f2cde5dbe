"""Sparse gradients of embedding tables.

They hold the rows of the words in the batch only, and each row once, so that an optimiser need not coalesce
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def bag_sum(
    weight: Tensor,  # (V, D)
    ids: Tensor,  # (T,) int64
    offsets: Tensor,  # (B,) int64, the position in ids where each bag begins; ascending from 0
) -> Tensor:
    """The sum of each bag's rows of `weight`, (B, D); its gradient for `weight` is sparse and coalesced."""
    apply: Callable[..., Tensor] = _BagSum.apply  # torch gives `apply` no types
    return apply(weight, ids, offsets)


class _BagSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(ids, offsets)
        ctx.table = weight.shape
        return F.embedding_bag(ids, weight, offsets, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("bag_sum has no second derivative: differentiate it without create_graph=True")
        ids, offsets = ctx.saved_tensors
        lengths = torch.diff(offsets, append=offsets.new_tensor([len(ids)]))
        bags = torch.repeat_interleave(torch.arange(len(offsets), device=ids.device), lengths)
        rows, values = sum_by_row(ids, bags, grad)
        return row_gradient(rows, values, ctx.table), None, None


def sum_by_row(
    ids: Tensor,  # (T,) int64
    sources: Tensor,  # (T,) int64
    values: Tensor,  # (B, D)
) -> tuple[Tensor, Tensor]:
    """Sums values[sources] over equal ids: the distinct ids (R,), ascending, and the sum of each, (R, D)."""
    rows, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    # Sorted by id, the sources of each distinct id are a bag, which `embedding_bag` sums.
    order = inverse.argsort(stable=True)
    return rows, F.embedding_bag(sources[order], values, counts.cumsum(0) - counts, mode="sum")


def distinct_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows (R,) of a sparse gradient (V, D) in ascending order, and their values (R, D)."""
    if grad.is_coalesced():
        return grad.indices()[0], grad.values()
    ids = grad._indices()[0]
    return sum_by_row(ids, torch.arange(len(ids), device=ids.device), grad._values())


def row_gradient(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A coalesced sparse gradient from distinct ascending rows (R,) and their values (R, D)."""
    return torch.sparse_coo_tensor(
        rows[None], values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )
