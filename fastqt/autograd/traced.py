"""An engine as torch.compile sees it: its three functions as opaque operators that carry its name.

Dynamo cannot trace into an engine. It records these operators instead, and a compiled loss then runs on the
engine that was chosen when it was traced.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastqt.autograd.operators import Operators, as_tensors, fake_gradients, wanted
from fastqt.devices import accumulation_dtype
from fastqt.engines import ENGINES, Computation
from fastqt.problem import Needs, Problem, Rows, loss_dtype


class TracedEngine:
    """An engine as torch.compile sees it, for a `Problem`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def gradients_in_forward(self, p: Any) -> bool:
        computation: Computation = ENGINES[self.name].computation(p)
        return computation.gradients_in_forward(p)

    def forward(self, p: Any) -> Rows:
        loss, *saved = _FORWARD(*OPERATORS.arguments(p), self.name)
        return Rows(loss, tuple(saved))

    def forward_with_gradients(
        self, p: Any, row_weight: Any, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        total, *gradients = _FORWARD_WITH_GRADIENTS(
            *OPERATORS.arguments(p), self.name, row_weight, list(needs)
        )
        return total, wanted(gradients, needs)

    def backward(
        self, p: Any, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs
    ) -> tuple[Tensor | None, ...]:
        gradients = _BACKWARD(*OPERATORS.arguments(p), self.name, *saved, row_weights, list(needs))
        return wanted(gradients, needs)


def _forward(p: Problem, engine: str) -> list[Tensor]:
    rows = ENGINES[engine].computation(p).forward(p)
    return [rows.loss, *rows.saved]


def _fake_forward(p: Problem, engine: str) -> list[Tensor]:
    dtype = accumulation_dtype(p.queries.device)
    return [p.queries.new_empty(p.queries.shape[0], dtype=dtype) for _ in range(3)]


def _forward_with_gradients(p: Problem, engine: str, row_weight: Tensor, needs: list[bool]) -> list[Tensor]:
    computation = ENGINES[engine].computation(p)
    total, gradients = computation.forward_with_gradients(p, row_weight.item(), Needs(*needs))
    return [total, *as_tensors(gradients, p)]


def _fake_forward_with_gradients(
    p: Problem, engine: str, row_weight: Tensor, needs: list[bool]
) -> list[Tensor]:
    return [p.queries.new_empty((), dtype=loss_dtype(p.queries)), *fake_gradients(p, needs)]


def _backward(
    p: Problem, engine: str, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: list[bool]
) -> list[Tensor]:
    computation = ENGINES[engine].computation(p)
    return as_tensors(computation.backward(p, (logsumexp, mass), row_weights, Needs(*needs)), p)


def _fake_backward(
    p: Problem, engine: str, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: list[bool]
) -> list[Tensor]:
    return fake_gradients(p, needs)


OPERATORS = Operators(Problem)
_FORWARD = OPERATORS.define("contrastive_forward", "str engine", _forward, _fake_forward)
_FORWARD_WITH_GRADIENTS = OPERATORS.define(
    "contrastive_forward_with_gradients",
    "str engine, Tensor row_weight, bool[] needs",
    _forward_with_gradients,
    _fake_forward_with_gradients,
)
_BACKWARD = OPERATORS.define(
    "contrastive_backward",
    "str engine, Tensor logsumexp, Tensor mass, Tensor row_weights, bool[] needs",
    _backward,
    _fake_backward,
)
