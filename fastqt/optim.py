"""Adam over embedding tables, of which a batch touches a tenth: exact, without a dense gradient a step.

A dense gradient of a (50,000, 300) table is 60 MB of fresh memory that is zeroed, summed, scaled and read,
although only the rows of the batch's words differ from zero. Here backward gives those rows alone, and one
table of zeros is kept for the optimiser to read them from.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    result: Tensor = _BagSum.apply(weight, ids, offsets)  # type: ignore[no-untyped-call]
    return result


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
        rows, values = _sum_by_row(ids, bags, grad)
        return _sparse(rows, values, ctx.table), None, None


def _sum_by_row(
    ids: Tensor,  # (T,) int64
    sources: Tensor,  # (T,) int64
    values: Tensor,  # (B, D)
) -> tuple[Tensor, Tensor]:
    """The distinct ids, sorted, and for each the sum of values[sources] where ids is it: bags again."""
    rows, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    order = inverse.argsort(stable=True)
    return rows, F.embedding_bag(sources[order], values, counts.cumsum(0) - counts, mode="sum")


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, which takes sparse gradients of tables too and treats them as dense ones.

    Unlike torch's SparseAdam, rows without a gradient go on moving by their momentum.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, lr=lr, fused=True)
        self._dense: dict[Tensor, Tensor] = {}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        touched: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    rows, values = _rows(parameter.grad)
                    if parameter not in self._dense:
                        self._dense[parameter] = torch.zeros_like(parameter)
                    parameter.grad = self._dense[parameter].index_copy_(0, rows, values)
                    touched.append((parameter, rows))
        super().step()
        for parameter, rows in touched:
            self._dense[parameter].index_fill_(0, rows, 0)
            parameter.grad = None


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales gradients, sparse ones too, in place to a common norm of at most `max_norm`; returns the norm.

    The same as `torch.nn.utils.clip_grad_norm_`.
    """
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            rows, values = _rows(parameter.grad)
            parameter.grad = _sparse(rows, values, parameter.shape)
            grads.append(values)
        else:
            grads.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(grads)
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def _rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of a sparse gradient, each once, and their values."""
    if grad.is_coalesced():
        return grad.indices()[0], grad.values()
    ids = grad._indices()[0]
    return _sum_by_row(ids, torch.arange(len(ids), device=ids.device), grad._values())


def _sparse(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)
