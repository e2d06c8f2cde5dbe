"""Adam over embedding tables, of which a batch touches a tenth: exact, without a dense gradient a step.

A dense gradient of a (50,000, 300) table is 60 MB of fresh memory that is zeroed, summed, scaled and read,
although only the rows of the batch's words differ from zero. Here backward gives those rows alone, and one
table of zeros is kept for the optimiser to read them from.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fastqt.row_gradients import distinct_rows, row_gradient


class Adam(torch.optim.Adam):
    """`torch.optim.Adam`, fused, which takes sparse gradients of tables too and treats them as dense ones.

    Unlike torch's SparseAdam, rows without a gradient go on moving by their momentum.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        super().__init__(parameters, lr=lr, fused=True)
        self._dense: dict[Tensor, Tensor] = {}

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # a closure is not evaluated
        touched: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    rows, values = distinct_rows(parameter.grad)
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
            rows, values = distinct_rows(parameter.grad)
            parameter.grad = row_gradient(rows, values, parameter.shape)
            grads.append(values)
        else:
            grads.append(parameter.grad)
    norm = torch.nn.utils.get_total_norm(grads)
    torch._foreach_mul_(grads, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
