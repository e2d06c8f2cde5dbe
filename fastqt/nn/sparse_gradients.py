"""Gradients of embedding tables that hold the rows of a batch's words alone, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def bag_sum(
    weight: Tensor,  # (V, D)
    ids: Tensor,  # (T,) int64
    offsets: Tensor,  # (B,) int64, the first id of each bag; rising, the first one 0
) -> Tensor:
    """Sums of the rows of bags of ids, (B, D), with a sparse gradient for `weight` that holds a row once."""
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
            raise RuntimeError("bag_sum has no second derivative: take the first without create_graph=True")
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
    """The distinct ids, sorted, and for each the sum of values[sources] where ids is it: bags again."""
    rows, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    order = inverse.argsort(stable=True)
    return rows, F.embedding_bag(sources[order], values, counts.cumsum(0) - counts, mode="sum")


def distinct_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse gradient, each once, and their values."""
    if grad.is_coalesced():
        return grad.indices()[0], grad.values()
    ids = grad._indices()[0]
    return sum_by_row(ids, torch.arange(len(ids), device=ids.device), grad._values())


def row_gradient(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
