"""CLIP's loss on a CPU: one walk for the log-sum-exp of rows and columns, one for the gradients of both.

The walks are C++, in csrc/cpu/clip.cpp: 8 N² D operations in all, or 6 where all scores are at hand at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt import schedule
from fastqt.checks import check_not_recorded


def clip_loss_on_cpu(
    a: Tensor,  # (N, D), float32 or float64
    b: Tensor,  # the same
    scale: float | Tensor,
    reduction: str,
    memory: str,
) -> Tensor:
    """The loss of pairs of rows, reduced; differentiable once in all tensors."""
    apply: Callable[..., Tensor] = _Clip.apply  # torch gives `apply` no types
    return apply(torch.is_grad_enabled(), reduction, memory, a, b, scale)


class _Clip(torch.autograd.Function):
    """A scalar loss takes its gradients in the forward pass, as a training wants both."""

    @staticmethod
    def forward(
        ctx: Any, recorded: bool, reduction: str, memory: str, a: Tensor, b: Tensor, scale: float | Tensor
    ) -> Tensor:
        N, ctx.needs, ctx.memory = len(a), ctx.needs_input_grad[3:], memory
        ctx.scale = scale.item() if isinstance(scale, Tensor) else scale
        if not math.isfinite(ctx.scale):
            raise ValueError(f"scale: want a finite number, got {ctx.scale}")
        weights = None
        if recorded and reduction != "none" and any(ctx.needs):
            weights = torch.full((N,), 1 / N if reduction == "mean" else 1.0, dtype=torch.float64)
        sums = torch.empty(3, N, dtype=torch.float64)
        losses, gradients = _walk(ctx, a, b, sums, weights, known=False)
        ctx.gradients = None if weights is None else gradients
        ctx.save_for_backward(a, b, scale if isinstance(scale, Tensor) else None, sums)
        loss = losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
        return loss.to(a.dtype)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_not_recorded("fastqt.clip_loss")
        (a, b, scale, sums), (g,) = ctx.saved_tensors, upstream
        if ctx.gradients is not None:
            da, db, dscale = (x if x is None else x * g.to(x.dtype) for x in ctx.gradients)
        else:
            _, (da, db, dscale) = _walk(ctx, a, b, sums, g.double().contiguous(), known=True)
        return None, None, None, da, db, dscale if dscale is None else dscale.to(scale)


def _walk(
    ctx: Any, a: Tensor, b: Tensor, sums: Tensor, weights: Tensor | None, *, known: bool
) -> tuple[Tensor, list[Tensor | None]]:
    """The losses, and with weights w the gradients of sum_i w_i loss_i that are wanted."""
    N = len(a)
    gradients: list[Tensor | None] = [None, None, None]
    if weights is not None:
        fresh = torch.empty(a.shape, dtype=a.dtype), torch.empty(b.shape, dtype=b.dtype), sums.new_empty(())
        gradients = [x if need else None for x, need in zip(fresh, ctx.needs, strict=True)]
    losses = sums.new_empty(N)
    torch.ops.fastqt.clip_walk_.default(
        *(a, b, ctx.scale, *_tile(a, ctx.memory), known, sums, losses, weights, *gradients)
    )
    return losses, gradients


def _tile(a: Tensor, memory: str) -> tuple[int, int]:
    """Rows and columns of scores that are at hand at once."""
    N = len(a)
    if memory == "fast" and N * N * a.element_size() <= schedule.CHUNK_BYTES:
        return N, N
    return schedule.TILE_ROWS, schedule.TILE_COLUMNS
