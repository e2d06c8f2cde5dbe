"""The norm of gradients, of which some are sparse."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastqt.nn.sparse_gradients import distinct_rows, row_gradient


def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients in place so that their total L2 norm is at most `max_norm`; returns what it was.

    The result is that of `torch.nn.utils.clip_grad_norm_`. Sparse gradients are accepted too: of a table only
    the rows that have a gradient are read and written.

    Example:
        >>> import torch, fastqt
        >>> embedding = fastqt.nn.StaticEmbedding(100, 4, sparse=True)
        >>> embedding(torch.tensor([5, 7, 7]), torch.tensor([0])).sum().backward()
        >>> norm = fastqt.optim.clip_grad_norm_(embedding.parameters(), 1.0)
    """
    grads = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if parameter.grad.is_sparse:
            rows, values = distinct_rows(parameter.grad)
            parameter.grad = row_gradient(rows, values, parameter.shape)
            grads.append(values)
        else:
            grads.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(grads)
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
