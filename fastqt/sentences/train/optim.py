"""Adam for embedding tables: the steps of dense Adam without a new dense gradient in each step.

A batch uses only about a tenth of the words. A dense gradient of a (50,000, 300) table would nevertheless
allocate, zero, sum, scale and read 60 MB in each step. Here the backward pass returns the gradients of the
used rows only. They are written into one table of zeros that is kept between the steps, and torch's fused
Adam reads the gradient from that table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from fastqt.nn.sparse_gradients import distinct_rows, row_gradient


class Adam(torch.optim.Adam):
    """Fused `torch.optim.Adam` that also accepts sparse gradients and treats them as dense ones.

    A row without a gradient still moves by its momentum, as in dense Adam. (In torch's SparseAdam it does
    not.) With `decoupled_weight_decay` it is `torch.optim.AdamW`.

    A table with sparse gradients must not decay, because a step would have to read all of its rows.
    """

    def __init__(self, parameters: ParamsT, lr: float, **options: Any) -> None:
        super().__init__(parameters, lr=lr, fused=True, **options)
        # A GradScaler is then to leave out a whole step, not only torch's part of it.
        self._step_supports_amp_scaling = False
        self._dense_gradients: dict[Tensor, Tensor] = {}

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # closures are not supported
        """Takes one step. The gradients of tables are reset to None; dense gradients are kept."""
        tables: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    rows, values = distinct_rows(parameter.grad)
                    parameter.grad = self._dense_gradient(parameter, rows, values, group)
                    tables.append((parameter, rows))
        super().step()
        for parameter, rows in tables:
            if parameter.grad is not None:
                parameter.grad.index_fill_(0, rows, 0)
            parameter.grad = None

    def _dense_gradient(
        self,
        table: Tensor,  # (n, D)
        rows: Tensor,  # (B,) int64, distinct
        values: Tensor,  # (B, D)
        group: dict[str, Any],
    ) -> Tensor | None:
        """The table's gradient (n, D) for torch's step; None if torch's step must skip the table."""
        if table not in self._dense_gradients:
            self._dense_gradients[table] = torch.zeros_like(table)
        return self._dense_gradients[table].index_copy_(0, rows, values)


class RowAdam(Adam):
    """Adam that treats each row of a table with a sparse gradient as a parameter of its own.

    A row moves only in the steps in which it has a gradient, and it counts these steps itself: its moments
    and their bias correction depend on the row's own gradients only. All other rows stay unchanged, and no
    memory of the table's size is read or written. Parameters with dense gradients are handled as by
    `torch.optim.Adam`.
    """

    counts_rows = True  # `fastqt.sentences.runs.checkpoint` then expects as many steps as rows

    @torch.no_grad()
    def _dense_gradient(self, table: Tensor, rows: Tensor, values: Tensor, group: dict[str, Any]) -> None:
        """Updates the rows here and returns None, so that torch's step skips the table."""
        lr, betas, eps = group["lr"], group["betas"], group["eps"]
        state = self.state[table]
        if not state:
            state["step"] = torch.zeros(len(table), device=table.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(table), torch.zeros_like(table)
        # The rows are distinct: each is gathered, changed and written back.
        count = state["step"].index_select(0, rows) + 1
        mean = state["exp_avg"].index_select(0, rows).lerp_(values, 1 - betas[0])
        square = state["exp_avg_sq"].index_select(0, rows).mul_(betas[1])
        square.addcmul_(values, values, value=1 - betas[1])
        for key, value in (("step", count), ("exp_avg", mean), ("exp_avg_sq", square)):
            state[key].index_copy_(0, rows, value)
        corrections = (1 - beta ** count.double()[:, None] for beta in betas)
        mean_correction, square_correction = (correction.to(table.dtype) for correction in corrections)
        root = square.div_(square_correction).sqrt_().add_(eps)
        moved = table.index_select(0, rows).addcdiv_(mean.div_(mean_correction), root, value=-lr)
        table.index_copy_(0, rows, moved)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales all gradients in place so that their total L2 norm is at most `max_norm`; returns what it was.

    The result is that of `torch.nn.utils.clip_grad_norm_`. Sparse gradients are accepted too.
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
