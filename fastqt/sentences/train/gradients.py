"""The sums of gradients over the processes of a training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from fastqt.nn.sparse_gradients import distinct_rows, row_gradient


def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Replaces the gradients of all processes of the default process group by their sums.

    The parameters are the same on each process, on one device; each has a gradient on all processes or on
    none, and a sparse one on all or on none. All gradients of one dtype travel in one exchange. Of a sparse
    one, which has rows of a table, the rows go that any process has: the union of these rows is found first,
    by an exchange of one byte for each row of the table. Each sum is made on one process or in one order, so
    that all processes get the same bits.
    """
    graded = [parameter for parameter in parameters if parameter.grad is not None]
    _align_rows(
        [parameter for parameter in graded if parameter.grad is not None and parameter.grad.is_sparse]
    )
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in graded:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for same in by_dtype.values():
        _sum_values(same)


def _align_rows(tables: list[Tensor]) -> None:
    """Gives the sparse gradient of each table the rows that it has on any process; new rows are zeros."""
    if not tables:
        return
    local = [distinct_rows(table.grad) for table in tables if table.grad is not None]
    used = [
        rows.new_zeros(len(table), dtype=torch.uint8) for table, (rows, _) in zip(tables, local, strict=True)
    ]
    for mask, (rows, _) in zip(used, local, strict=True):
        mask.index_fill_(0, rows, 1)
    whole = torch.cat(used)
    dist.all_reduce(whole, dist.ReduceOp.MAX)
    masks = whole.split([len(mask) for mask in used])
    for table, mask, (rows, values) in zip(tables, masks, local, strict=True):
        union = mask.nonzero()[:, 0]
        aligned = values.new_zeros(len(union), *values.shape[1:])
        aligned.index_copy_(0, torch.searchsorted(union, rows), values)
        table.grad = row_gradient(union, aligned, table.shape)


def _sum_values(parameters: list[Tensor]) -> None:
    values = [_values(parameter) for parameter in parameters]
    flat = torch.cat([each.reshape(-1) for each in values])
    dist.all_reduce(flat)
    for each, summed in zip(values, flat.split([each.numel() for each in values]), strict=True):
        each.copy_(summed.view(each.shape))


def _values(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None  # for mypy: `sum_gradients` has chosen those with one
    return gradient.values() if gradient.is_sparse else gradient
