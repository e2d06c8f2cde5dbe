"""What travels between ranks, as autograd functions: rows that all gather, and sums over all ranks.

`gather` and `total` are each other's transposes up to the group's factor, and a loss that is composed of
plain losses between the two has the right gradients for every leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.distributed import steps
from fastqt.distributed.group import Group

# torch 2.13 has renamed these two, and warns of the old names.
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def gather(x: Tensor, counts: Sequence[int], group: Group, dtype: torch.dtype | None = None) -> Tensor:
    """The rows of all ranks in the order of the ranks; each rank's gradient is the sum over all ranks.

    Args:
        x: (n, ...), of the same n at every rank or as `counts` says.
        counts: the number of rows of each rank.
        group: the ranks.
        dtype: what the rows travel in, and have there; by default their own.

    Returns:
        (sum of counts, ...)
    """
    return _gather(x, tuple(counts), group, dtype or x.dtype)


def gather_constant(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """`gather` of what has no gradient."""
    return _gathered(x.detach(), counts, group)


def total(local: Tensor, group: Group) -> Tensor:
    """The sum of a number () over all ranks, the same bits at each; its backward has the group's factor."""
    return _total(local, group)


def reduced(local: Tensor, reduction: str, rows: int, group: Group) -> Tensor:
    """The loss of all ranks.

    Args:
        local: this rank's: the losses of its rows (n,) for reduction="none", otherwise their sum.
        reduction: "mean", "sum" or "none".
        rows: the number of rows of all ranks.
        group: the ranks.
    """
    if reduction == "none":
        return shared(local, group)
    whole = total(local, group)
    return whole / rows if reduction == "mean" else whole


def nothing(leaves: Iterable[object], reduction: str) -> Tensor:
    """The `local` of a rank without rows: gradients of 0 flow to all leaves, for which other ranks wait."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    rows = torch.cat([x.reshape(-1)[:0].to(dtype) for x in tensors])
    return rows if reduction == "none" else rows.sum()


def shared(rows: Tensor, group: Group) -> Tensor:
    """A rank's own rows as they are; their backward has the group's factor."""
    return rows if group.factor == 1 else _shared(rows, group.factor)


def unshared(rows: Tensor, group: Group) -> Tensor:
    """Rows whose backward has the group's factor, as a part of what will have it again."""
    return rows if group.factor == 1 else _shared(rows, 1 / group.factor)


def sum_rows(parts: Tensor, counts: Sequence[int], group: Group, dtype: torch.dtype) -> Tensor:
    """The sum over all ranks of this rank's rows, each rank having a part for all.

    Args:
        parts: (sum of counts, ...), in the order of the ranks.
        counts: the number of rows of each rank.
        group: the ranks, and what the parts travel in.
        dtype: of the result.
    """
    padded = _padded(parts, counts) if len(set(counts)) > 1 else parts.contiguous()
    most, mine = max(counts), counts[group.rank]
    travelling = travelling_dtype(parts.dtype, group)
    if travelling is torch.bfloat16 or not parts.is_cuda:
        # A reduction would round bfloat16 at every hop, and Gloo's takes twice the CPU time of this. Parts
        # are therefore sent as they are and added up here.
        sent = padded.to(travelling)
        received = torch.empty_like(sent)
        swap = dist.all_to_all_single
        steps.exchange(group, "gradients of rows", swap, received, sent, group=group.process_group)
        shape = (group.size, most, *parts.shape[1:])
        return received.view(shape).sum(0, dtype=torch.promote_types(dtype, torch.float32))[:mine].to(dtype)
    summed = padded.new_empty((most, *parts.shape[1:]), dtype=travelling)
    sent = padded.to(travelling)
    steps.exchange(group, "gradients of rows", reduce_scatter, summed, sent, group=group.process_group)
    return summed[:mine].to(dtype)


def travelling_dtype(dtype: torch.dtype, group: Group) -> torch.dtype:
    """What gradients of a dtype travel in."""
    if group.return_dtype is torch.bfloat16:
        return torch.bfloat16
    return torch.promote_types(dtype, torch.float32)


def add_up(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, in place."""
    steps.exchange(group, "sums", dist.all_reduce, x, group=group.process_group)
    return x


def of_first_rank(x: Tensor, group: Group) -> Tensor:
    """What the first rank of the group has, in place."""
    steps.exchange(group, "numbers", dist.broadcast, x, group=group.process_group, group_src=0)
    return x


def sum_replicated(x: Tensor, group: Group) -> Tensor:
    """The sum over all ranks, of which each computes the same; its backward has the group's factor."""
    return _sum_replicated(x, group)


def log_add_up(x: Tensor, group: Group) -> Tensor:
    """log sum_r exp(x_r) over all ranks, in the dtype of x; -inf at a rank adds nothing."""
    most = x.clone()
    steps.exchange(group, "maxima", dist.all_reduce, most, dist.ReduceOp.MAX, group=group.process_group)
    finite = most.where(most.isfinite(), 0)
    return add_up((x - finite).exp(), group).log() + finite


def _gathered(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    most = max(counts)
    x = x.contiguous()
    if len(x) < most:
        x = torch.cat([x, x.new_zeros(most - len(x), *x.shape[1:])])
    found = x.new_empty(group.size * most, *x.shape[1:])
    steps.exchange(group, "rows", all_gather, found, x, group=group.process_group)
    if len(set(counts)) == 1:
        # A view, as torch.compile of torch 2.11 finds no gradient for what was written in place.
        return found.view_as(found)
    return torch.cat([found[rank * most : rank * most + count] for rank, count in enumerate(counts)])


def _padded(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Rows in the order of ranks with zeros after each rank's, so that all have as many."""
    most = max(counts)
    padded = x.new_zeros(len(counts), most, *x.shape[1:])
    for place, rows in zip(padded, x.split(list(counts)), strict=True):
        place[: len(rows)] = rows
    return padded.flatten(0, 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], group: Group, dtype: torch.dtype) -> Tensor:
        ctx.counts, ctx.group, ctx.dtype = counts, group, x.dtype
        return _gathered(x.to(dtype), counts, group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(upstream[0], ctx.counts, ctx.group, ctx.dtype), None, None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Group) -> Tensor:
        ctx.factor = group.factor
        part = local.to(accumulation_dtype(local.device)).reshape(1)
        parts = part.new_empty(group.size)
        steps.exchange(group, "losses", all_gather, parts, part, group=group.process_group)
        return parts.sum().to(local.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0] * ctx.factor, None


class _SumReplicated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.factor = group.factor
        return add_up(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0] * ctx.factor, None


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return upstream[0] * ctx.factor, None


# torch gives `apply` no types.
_gather: Callable[..., Tensor] = _Gather.apply
_total: Callable[..., Tensor] = _Total.apply
_sum_replicated: Callable[..., Tensor] = _SumReplicated.apply
_shared: Callable[..., Tensor] = _Shared.apply
