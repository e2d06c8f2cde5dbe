"""The computation of a loss by one function, which adds its gradients up while it walks over the rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastqt.devices import accumulation_dtype
from fastqt.problem import Rows

# It takes a problem, the weights of its rows, (N,) float64, or None, and a tensor for each input that wants
# a gradient. It returns the loss of each row, (N,) float64, and adds the gradients of the losses' weighted
# sum to these tensors.
Walk: TypeAlias = "Callable[[Any, Tensor | None, Any], Tensor]"


class AddingWalk:
    """Computes a loss that no engine has, in plain PyTorch on any device; see `fastqt.engines`."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def gradients_in_forward(self, p: Any) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return True

    def forward(self, p: Any) -> Rows:
        """The loss of each row."""
        return Rows(self._walk(p, None, p.needs_type()), ())

    def forward_with_gradients(self, p: Any, row_weight: float, needs: Any) -> tuple[Tensor, Any]:
        """row_weight * sum_i loss_i, and its gradients."""
        gradients = _zeros(p, needs)
        dtype = accumulation_dtype(p.queries.device)
        weights = p.queries.new_full((len(p.queries),), row_weight, dtype=dtype)
        losses = self._walk(p, weights, gradients)
        return (row_weight * losses.sum()).to(p.queries.dtype), gradients

    def backward(self, p: Any, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Any) -> Any:
        """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
        gradients = _zeros(p, needs)
        self._walk(p, row_weights.to(accumulation_dtype(row_weights.device)), gradients)
        return gradients


def _zeros(p: Any, needs: Any) -> Any:
    """The gradients before the walk; that of a scalar, a sum over all rows, in the dtype of accumulation."""
    of_scalar = torch.zeros((), dtype=accumulation_dtype(p.queries.device), device=p.queries.device)
    return p.needs_type(
        *[
            None if not need or x is None else torch.zeros_like(x) if x.dim() else of_scalar
            for x, need in zip(p.inputs(), needs, strict=True)
        ]
    )
