"""Inner products of columns, D x D, from which sums over all pairs of rows follow without these pairs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt.torch_modes import without_autocast

ROWS = 1024  # that are converted to another dtype at a time


def gram(
    x: Tensor,  # (N, D)
    beside: Tensor | None = None,  # (N, E), without a gradient
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x.T @ [x, beside], (D, D + E), whose backward pass takes one product in place of two.

    Its products and the sums over rows, those of the gradient too, are computed in `dtype`, by default that
    of x, whatever autocast says.
    """
    beside = x.detach()[:, :0] if beside is None else beside
    return _gram(x, beside, x.dtype if dtype is None else dtype)


class _Gram(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, beside: Tensor, dtype: torch.dtype) -> Tensor:
        with without_autocast(x):
            if x.dtype is dtype:
                return x.T @ _joined(x, beside, dtype)
            sums = x.new_zeros(x.shape[1], x.shape[1] + beside.shape[1], dtype=dtype)
            for rows, others in zip(x.split(ROWS), beside.split(ROWS), strict=True):
                sums = sums + rows.T.to(dtype) @ _joined(rows, others, dtype)
            return sums

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, torch.dtype], output: Tensor) -> None:
        x, beside, ctx.dtype = inputs
        ctx.save_for_backward(x, beside)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, beside = ctx.saved_tensors
        of_x, of_beside = upstream[0].split([x.shape[1], beside.shape[1]], 1)
        weights = of_x + of_x.T
        if beside.shape[1]:
            weights = torch.cat([weights, of_beside.T])
        with without_autocast(x):
            if x.dtype is ctx.dtype:
                return _joined(x, beside, x.dtype) @ weights, None, None
            parts = [
                (_joined(rows, others, ctx.dtype) @ weights).to(x.dtype)
                for rows, others in zip(x.split(ROWS), beside.split(ROWS), strict=True)
            ]
        return torch.cat(parts), None, None


def _joined(x: Tensor, beside: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of both in a dtype, (n, D + E)."""
    x = x.to(dtype)
    return torch.cat([x, beside.to(dtype)], 1) if beside.shape[1] else x


class _Scores(torch.autograd.Function):
    """x @ y.T, (N, M), of x (N, D) and y (M, D); autograd's own gradients would be subject to autocast."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        with without_autocast(x):
            return x @ y.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        of_x, of_y = ctx.needs_input_grad
        with without_autocast(x):
            return upstream[0] @ y if of_x else None, upstream[0].T @ x if of_y else None


class _Sums(torch.autograd.Function):
    """The sum of rows, (D,), and their squared norms, (N,), both in `dtype`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        total, squares = x.new_zeros(x.shape[1], dtype=dtype), []
        for rows in x.split(ROWS):
            exact = rows.to(dtype)
            total = total + exact.sum(0)
            squares.append((exact * exact).sum(1))
        return total, torch.cat(squares)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        of_total, of_squares = (y.to(x.dtype) for y in upstream)
        return torch.addcmul(of_total.expand(x.shape), x, 2 * of_squares[:, None]), None


# torch gives `apply` no types.
sums: Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]] = _Sums.apply
scores: Callable[[Tensor, Tensor], Tensor] = _Scores.apply
_gram: Callable[..., Tensor] = _Gram.apply
