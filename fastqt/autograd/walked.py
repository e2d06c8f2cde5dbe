"""Losses that no engine has: plain PyTorch on any device, and operators of it where torch.compile traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastqt.autograd.operators import Operators, as_tensors, fake_gradients, wanted
from fastqt.devices import accumulation_dtype
from fastqt.problem import Rows
from fastqt.torch_modes import is_traced

# It takes a problem, the weights of its rows (N,) float64 or None, and which inputs want a gradient. It
# returns the loss of each row, (N,), and with weights the gradients of their weighted sum, None where none is
# wanted.
Walk: TypeAlias = "Callable[[Any, Tensor | None, Any], tuple[Tensor, Sequence[Tensor | None]]]"
# The same, but that it takes a tensor for each gradient that is wanted, to which it adds.
AddingWalk: TypeAlias = "Callable[[Any, Tensor | None, Any], Tensor]"


class Walked:
    """Computes a loss that no engine has; see `fastqt.engines`.

    Args:
        walk: computes the rows and their gradients.
    """

    def __init__(self, walk: Walk) -> None:
        self._walk = walk

    def gradients_in_forward(self, p: Any) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return True

    def forward(self, p: Any) -> Rows:
        """The loss of each row."""
        return Rows(self._rows_and_gradients(p, None, p.needs_type())[0], ())

    def forward_with_gradients(self, p: Any, row_weight: float | Tensor, needs: Any) -> tuple[Tensor, Any]:
        """row_weight * sum_i loss_i, and its gradients."""
        dtype = accumulation_dtype(p.queries.device)
        weights = torch.ones(len(p.queries), dtype=dtype, device=p.queries.device) * row_weight
        losses, gradients = self._rows_and_gradients(p, weights, needs)
        # A copy, as torch 2.11's compiler gives an output that is another tensor itself a gradient of 0.
        if isinstance(row_weight, Tensor):  # The sum would take its float64, which a device may not have.
            row_weight = row_weight.to(losses.dtype)
        return (row_weight * losses.sum()).to(p.queries.dtype, copy=True), gradients

    def backward(self, p: Any, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Any) -> Any:
        """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
        return self._rows_and_gradients(p, row_weights, needs)[1]

    def _rows_and_gradients(
        self, p: Any, row_weights: Tensor | None, needs: Any
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        losses, gradients = self._walk(p, row_weights, needs)
        return losses.to(accumulation_dtype(losses.device)), gradients


class WalkedOperator(Walked):
    """One that torch.compile takes as an operator, `fastqt::<name>_walk`, which no tracer looks into.

    A walk visits one chunk of rows after the other, and how many there are depends on sizes and on values.

    Args:
        name: of the loss, for its operator.
        kind: the dataclass of its problems, whose fields have the types of `operators.TYPES`.
        walk: computes the rows and their gradients.

    Attributes:
        operator: takes the fields of a problem, the weights of its rows or None, and which inputs want a
            gradient; returns the losses of rows, and a gradient for each input, empty where none is wanted.
    """

    def __init__(self, name: str, kind: type[Any], walk: Walk) -> None:
        super().__init__(walk)
        self._operators = Operators(kind)
        arguments = "Tensor? row_weights, bool[] needs"
        self.operator = self._operators.define(f"{name}_walk", arguments, self._computed, self._fake)

    def _rows_and_gradients(
        self, p: Any, row_weights: Tensor | None, needs: Any
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        if not is_traced(p.queries):
            return super()._rows_and_gradients(p, row_weights, needs)
        losses, *gradients = self.operator(*self._operators.arguments(p), row_weights, list(needs))
        return losses, wanted(gradients, needs)

    def _computed(self, p: Any, row_weights: Tensor | None, needs: list[bool]) -> list[Tensor]:
        losses, gradients = self._walk(p, row_weights, p.needs_type(*needs))
        return [losses.to(accumulation_dtype(losses.device)), *as_tensors(gradients, p)]

    def _fake(self, p: Any, row_weights: Tensor | None, needs: list[bool]) -> list[Tensor]:
        """What the operator returns, without values."""
        needed = [need and row_weights is not None for need in needs]
        dtype = accumulation_dtype(p.queries.device)
        return [p.queries.new_empty(p.queries.shape[0], dtype=dtype), *fake_gradients(p, needed)]


def adding(walk: AddingWalk) -> Walk:
    """A walk that adds to gradients of 0, which it returns with the losses."""

    def returning(p: Any, row_weights: Tensor | None, needs: Any) -> tuple[Tensor, Sequence[Tensor | None]]:
        gradients = p.needs_type() if row_weights is None else _zeros(p, needs)
        if row_weights is not None:
            row_weights = row_weights.to(accumulation_dtype(row_weights.device))
        return walk(p, row_weights, gradients), gradients

    return returning


def _zeros(p: Any, needs: Any) -> Any:
    """The gradients before a walk; that of a scalar, a sum over all rows, in the dtype of accumulation."""
    of_scalar = torch.zeros((), dtype=accumulation_dtype(p.queries.device), device=p.queries.device)
    return p.needs_type(
        *[
            None if not need or x is None else torch.zeros_like(x) if x.dim() else of_scalar
            for x, need in zip(p.inputs(), needs, strict=True)
        ]
    )
