"""Losses that no engine has: plain PyTorch on any device, and operators of it where torch.compile traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fastqt.checks import is_traced
from fastqt.problem import Rows

# It takes a problem, the weights of its rows (N,) float64 or None, and which inputs want a gradient. It
# returns the loss of each row, (N,), and with weights the gradients of their weighted sum, None where none is
# wanted.
Walk: TypeAlias = "Callable[[Any, Tensor | None, Any], tuple[Tensor, Sequence[Tensor | None]]]"

# What the fields of a problem may be, as its class and as the schema of an operator write it.
_TYPES = {"Tensor": "Tensor", "Tensor | None": "Tensor?", "float": "float", "bool": "bool"}


class Walked:
    """Computes a loss that no engine has; see `fastqt.engines`.

    A walk visits one chunk of rows after the other, and how many there are depends on sizes and on values.
    Under torch.compile it is therefore one operator, `fastqt::<name>_walk`, which no tracer looks into.

    Args:
        name: of the loss, for its operator.
        kind: the dataclass of its problems, with `queries` (N, D) and fields of the types above.
        walk: computes the rows and their gradients.

    Attributes:
        operator: takes the fields of a problem, the weights of its rows or None, and which inputs want a
            gradient; returns the losses of rows, and a gradient for each input, empty where none is wanted.
    """

    def __init__(self, name: str, kind: type[Any], walk: Walk) -> None:
        fields = dataclasses.fields(kind)
        self._walk, self._kind = walk, kind
        self._names = [field.name for field in fields]
        schema = ", ".join(f"{_TYPES[str(field.type)]} {field.name}" for field in fields)
        operator = f"fastqt::{name}_walk"
        torch.library.define(operator, f"({schema}, Tensor? row_weights, bool[] needs) -> Tensor[]")
        torch.library.impl(operator, "CompositeExplicitAutograd", self._computed)
        torch.library.register_fake(operator, self._fake)
        self.operator = getattr(torch.ops.fastqt, f"{name}_walk")

    def gradients_in_forward(self, p: Any) -> bool:
        """Whether a scalar loss takes its gradients in the forward pass."""
        return True

    def forward(self, p: Any) -> Rows:
        """The loss of each row."""
        return Rows(self._rows_and_gradients(p, None, p.needs_type())[0], ())

    def forward_with_gradients(self, p: Any, row_weight: float, needs: Any) -> tuple[Tensor, Any]:
        """row_weight * sum_i loss_i, and its gradients."""
        weights = torch.full((len(p.queries),), row_weight, dtype=torch.float64, device=p.queries.device)
        losses, gradients = self._rows_and_gradients(p, weights, needs)
        return (row_weight * losses.sum()).to(p.queries.dtype), gradients

    def backward(self, p: Any, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Any) -> Any:
        """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
        return self._rows_and_gradients(p, row_weights, needs)[1]

    def _rows_and_gradients(
        self, p: Any, row_weights: Tensor | None, needs: Any
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        if not is_traced(p.queries):
            losses, gradients = self._walk(p, row_weights, needs)
            return losses.double(), gradients

        fields = [getattr(p, name) for name in self._names]
        losses, *found = self.operator(*fields, row_weights, list(needs))
        return losses, [g if need else None for g, need in zip(found, needs, strict=True)]

    def _computed(self, *args: Any) -> list[Tensor]:
        *fields, row_weights, needs = args
        p = self._kind(*fields)
        losses, gradients = self._walk(p, row_weights, p.needs_type(*needs))
        return [losses.double(), *(p.queries.new_empty(0) if g is None else g for g in gradients)]

    def _fake(self, *args: Any) -> list[Tensor]:
        """What the operator returns, without values; a gradient is empty where none is wanted."""
        *fields, row_weights, needs = args
        p = self._kind(*fields)
        gradients = [
            p.queries.new_empty(0)
            if x is None or not need or row_weights is None
            else x.new_empty(x.shape, dtype=x.dtype if x.dim() else torch.float64)
            for x, need in zip(p.inputs(), needs, strict=True)
        ]
        return [p.queries.new_empty(len(p.queries), dtype=torch.float64), *gradients]
