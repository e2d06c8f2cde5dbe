"""Bags of rows of embedding tables, and the sparse gradients of such tables.

They hold the rows of the words in the batch only, and each row once, so that an optimiser need not coalesce
them. On a CPU the extension sums (csrc/cpu/bags.cpp); elsewhere, and without it, torch does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fastqt.engines import ops
from fastqt.nn.lag import up_to_date

Mode = Literal["sum", "mean"]
NATIVE_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def is_native(tensor: Tensor) -> bool:
    """Whether the extension's operators are there and sum tensors of this device and dtype."""
    return ops.native_error is None and tensor.device.type == "cpu" and tensor.dtype in NATIVE_DTYPES


def pooled(table: nn.Embedding, ids: Tensor, offsets: Tensor, mode: Mode) -> Tensor:
    """The sum or mean of each bag's rows of a table, (B, D), with the kind of gradient that the table has."""
    (vectors,) = pooled_columns(table, [(ids, offsets)], mode)
    return vectors


def pooled_columns(
    table: nn.Embedding, columns: Sequence[tuple[Tensor, Tensor]], mode: Mode
) -> tuple[Tensor, ...]:
    """What `pooled` returns for each column; a sparse gradient of the table is that of all columns."""
    if not table.sparse:
        return tuple(F.embedding_bag(ids, table.weight, offsets, mode=mode) for ids, offsets in columns)
    for ids, _ in columns:
        up_to_date(table.weight, ids)
    return bag_sums(table.weight, columns, mode)


def bag_sum(
    weight: Tensor,  # (V, D)
    ids: Tensor,  # (T,) int64
    offsets: Tensor,  # (B,) int64, the position in ids where each bag begins; ascending from 0
    mode: Mode = "sum",
) -> Tensor:
    """The sum or the mean of each bag's rows of `weight`, (B, D); of an empty bag it is 0.

    Its gradient for `weight` is sparse and coalesced. RuntimeError for an id that is no row's.
    """
    (sums,) = bag_sums(weight, [(ids, offsets)], mode)
    return sums


def bag_sums(
    weight: Tensor,  # (V, D)
    columns: Sequence[tuple[Tensor, Tensor]],  # ids (T,) and offsets (B,) of each
    mode: Mode = "sum",
) -> tuple[Tensor, ...]:
    """What `bag_sum` returns for each column, with one gradient for `weight`, in which each row is once."""
    apply: Callable[..., tuple[Tensor, ...]] = _BagSums.apply  # torch gives `apply` no types
    return apply(weight, mode, *chain.from_iterable(columns))


class _BagSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, mode: Mode, *columns: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*columns)
        ctx.set_materialize_grads(False)
        ctx.table, ctx.mode = weight.shape, mode
        return tuple(
            _sums(weight, ids, offsets, mode)
            for ids, offsets in zip(columns[::2], columns[1::2], strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("bag_sum has no second derivative: differentiate it without create_graph=True")
        columns = ctx.saved_tensors
        # A column that the loss does not depend on has no gradient, and its rows have none by it.
        used = [
            (ids, offsets, grad)
            for ids, offsets, grad in zip(columns[::2], columns[1::2], grads, strict=True)
            if grad is not None
        ]
        nothing = (None,) * (1 + len(columns))
        if not used:
            return None, *nothing
        ids, offsets, values = _joined(used)
        rows, sums = sum_by_row(ids, values, ctx.table[0], offsets, ctx.mode)
        return row_gradient(rows, sums, ctx.table), *nothing


def _sums(weight: Tensor, ids: Tensor, offsets: Tensor, mode: Mode) -> Tensor:
    if is_native(weight):
        sums: Tensor = torch.ops.fastqt.bag_sum(
            weight, ids.contiguous(), offsets.contiguous(), mode == "mean"
        )
        return sums
    return F.embedding_bag(ids, weight, offsets, mode=mode)


def _joined(columns: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """The ids (T,), offsets (B,) and values (B, D) of the bags of all columns, one after the other."""
    if len(columns) == 1:
        return columns[0]
    ids, offsets, values = zip(*columns, strict=True)
    begins = itertools.accumulate((len(each) for each in ids[:-1]), initial=0)
    shifted = [each + begin for each, begin in zip(offsets, begins, strict=True)]
    return torch.cat(ids), torch.cat(shifted), torch.cat(values)


def sum_by_row(
    ids: Tensor,  # (T,) int64 in 0..size-1
    values: Tensor,  # (T, D), or (B, D) with offsets
    size: int,
    offsets: Tensor | None = None,  # (B,) int64; each id then has the values of its bag
    mode: Mode = "sum",  # "mean" divides the values of a bag by its number of ids
) -> tuple[Tensor, Tensor]:
    """Sums values over equal ids: the distinct ids (R,), ascending, and the sum of each, (R, D)."""
    if is_native(values):
        offsets = None if offsets is None else offsets.contiguous()
        native: tuple[Tensor, Tensor] = torch.ops.fastqt.sum_by_row(
            ids.contiguous(), offsets, values, size, mode == "mean"
        )
        return native

    sources = torch.arange(len(ids), device=ids.device)
    if offsets is not None:
        lengths = torch.diff(offsets, append=offsets.new_tensor([len(ids)]))
        sources = torch.repeat_interleave(torch.arange(len(offsets), device=ids.device), lengths)
        if mode == "mean":
            values = values / lengths.clamp(min=1).unsqueeze(1)

    rows, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
    # Sorted by id, the sources of each distinct id are a bag, which `embedding_bag` sums.
    order = inverse.argsort(stable=True)
    return rows, F.embedding_bag(sources[order], values, counts.cumsum(0) - counts, mode="sum")


def distinct_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct rows (R,) of a sparse gradient (V, D) in ascending order, and their values (R, D)."""
    rows, values = grad._indices()[0], grad._values()
    # Autograd forgets of a leaf's gradient that it is coalesced.
    if grad.is_coalesced() or bool((rows[1:] > rows[:-1]).all()):
        return rows, values
    return sum_by_row(rows, values, len(grad))


def row_gradient(rows: Tensor, values: Tensor, shape: torch.Size) -> Tensor:
    """A coalesced sparse gradient from distinct ascending rows (R,) and their values (R, D)."""
    return torch.sparse_coo_tensor(
        rows[None], values, shape, device=values.device, is_coalesced=True, check_invariants=False
    )


def _fake_bag_sum(table: Tensor, ids: Tensor, offsets: Tensor, mean: bool) -> Tensor:
    return table.new_empty(offsets.shape[0], table.shape[1])


def _fake_sum_by_row(ids: Tensor, offsets: Tensor | None, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    distinct = torch.library.get_ctx().new_dynamic_size()
    return ids.new_empty(distinct), values.new_empty(distinct, values.shape[1])


if ops.native_error is None:
    torch.library.register_fake("fastqt::bag_sum", _fake_bag_sum)
    torch.library.register_fake("fastqt::sum_by_row", _fake_sum_by_row)
