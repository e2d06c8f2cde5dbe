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

from fastqt.nn.sparse_gradients import distinct_rows, row_gradient


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
                    parameter.grad = self._as_dense(parameter, rows, values, group)
                    touched.append((parameter, rows))
        super().step()
        for parameter, rows in touched:
            if parameter.grad is not None:
                parameter.grad.index_fill_(0, rows, 0)
            parameter.grad = None

    def _as_dense(
        self,
        table: Tensor,  # (n, D)
        rows: Tensor,  # (B,) int64, distinct
        values: Tensor,  # (B, D)
        group: dict[str, Any],
    ) -> Tensor | None:
        """What torch's step is to see of a table's sparse gradient, (n, D); None for nothing."""
        if table not in self._dense:
            self._dense[table] = torch.zeros_like(table)
        return self._dense[table].index_copy_(0, rows, values)


class RowAdam(Adam):
    """Adam in which a row of a table moves only when it has a gradient, and counts its own steps.

    A parameter with a sparse gradient takes in each row named the step that Adam would take if that row
    were a parameter of its own: moments, and the correction of their bias, know the row's gradients alone.
    Other rows stay where they are, and nothing of the table's size is read or made. Parameters with dense
    gradients are treated as by `torch.optim.Adam`.
    """

    @torch.no_grad()
    def _as_dense(self, table: Tensor, rows: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        """Moves the rows; torch's step sees nothing."""
        lr, betas, eps = group["lr"], group["betas"], group["eps"]
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros(len(table), device=table.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        count = state["step"][rows] + 1
        mean = state["exp_avg"][rows].lerp_(values, 1 - betas[0])
        square = state["exp_avg_sq"][rows].mul_(betas[1]).addcmul_(values, values, value=1 - betas[1])
        for key, value in (("step", count), ("exp_avg", mean), ("exp_avg_sq", square)):
            state[key].index_copy_(0, rows, value)
        corrections = (1 - beta ** count.double()[:, None] for beta in betas)
        of_mean, of_square = (correction.to(table.dtype) for correction in corrections)
        root = square.div_(of_square).sqrt_().add_(eps)
        table.index_add_(0, rows, mean.div_(of_mean).div_(root), alpha=-lr)


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
