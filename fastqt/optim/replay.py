"""What rows have missed: dense Adam's steps while they had no gradient.

csrc/cpu/missed_steps.h says how many of them are taken at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines import ops
from fastqt.nn.sparse_gradients import is_native

WINDOW = 4096  # all rows are brought up to date after as many steps, so that no row misses more


def replay(
    table: Tensor,  # (V, D)
    state: dict[str, Tensor],  # step, exp_avg and exp_avg_sq as in torch; last (V,) int64; rates (WINDOW, 2)
    rows: Tensor | None,  # (T,) int64, in which a row may repeat; None for all
    settings: tuple[float, float, float],  # the decay rates of both moments, and eps
    *,
    moments: bool = True,
) -> None:
    """Moves the rows by all steps after `last` up to `step`, in place; without `moments` the table alone.

    RuntimeError for a number that is no row's.
    """
    step, table = int(state["step"]), table.detach()
    tensors = table, state["exp_avg"], state["exp_avg_sq"], state["last"]
    if is_native(table):
        rows = None if rows is None else rows.contiguous()
        torch.ops.fastqt.replay_rows_(*tensors, rows, state["rates"], step, *settings, moments)
    else:
        _replay_in_torch(*tensors, rows, state["rates"], step, settings, moments)


def _replay_in_torch(
    table: Tensor,
    mean: Tensor,
    square: Tensor,
    last: Tensor,
    rows: Tensor | None,
    rates: Tensor,
    step: int,
    settings: tuple[float, float, float],
    moments: bool,
) -> None:
    """Step by step: for a run of the extension that is resumed where there is none."""
    beta1, beta2, eps = settings
    behind = torch.arange(len(last), device=last.device) if rows is None else rows.unique()
    first = int(last[behind].min()) if len(behind) else step
    if not moments:
        mean, square, last = mean.clone(), square.clone(), last.clone()
    for number in range(first + 1, step + 1):
        these = behind[last[behind] < number].to(table.device)
        lr, keep = rates[(number - 1) % WINDOW].tolist()
        m, v = mean[these] * beta1, square[these] * beta2
        root = v.sqrt() / (1 - beta2**number) ** 0.5 + eps
        table[these] = keep * table[these] - lr / (1 - beta1**number) * m / root
        mean[these], square[these] = m, v
    last[behind] = step


if ops.native_error is None:
    torch.library.register_fake("fastqt::adam_rows_", lambda *_: None)
    torch.library.register_fake("fastqt::replay_rows_", lambda *_: None)
