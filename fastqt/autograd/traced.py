"""An engine as torch.compile sees it: its three functions as opaque operators that carry its name.

Dynamo cannot trace into an engine. It records these operators instead, and a compiled loss then runs on the
engine that was chosen when it was traced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fastqt import engines
from fastqt.problem import Gradients, Needs, Problem, Rows, loss_dtype
from fastqt.targets import TargetRows

_PROBLEM = (
    "Tensor queries, Tensor candidates, Tensor? negatives, Tensor? row_negatives, Tensor scale, "
    "Tensor? starts, Tensor? columns, Tensor? weights, Tensor? dense, Tensor? background, "
    "str diagonal, Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, str? memory, "
    "int? memory_bytes, Tensor? partners, float mix, Tensor? bias, str link, bool normalize, "
    "Tensor? row_scores"
)
_PROBLEM_SIZE = 22
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in Needs._fields)


class TracedEngine:
    """An engine as torch.compile sees it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def gradients_in_forward(self, p: Problem) -> bool:
        return engines.gradients_in_forward(self.name, p)

    def forward(self, p: Problem) -> Rows:
        loss, *saved = torch.ops.fastqt.contrastive_forward(*_flat(p), self.name)
        return Rows(loss, tuple(saved))

    def forward_with_gradients(
        self, p: Problem, row_weight: float, needs: Needs
    ) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        total, *found = torch.ops.fastqt.contrastive_forward_with_gradients(
            *_flat(p), self.name, row_weight, list(needs)
        )
        return total, _wanted(found, needs)

    def backward(
        self, p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs
    ) -> tuple[Tensor | None, ...]:
        known = (*saved, row_weights, list(needs))
        return _wanted(torch.ops.fastqt.contrastive_backward(*_flat(p), self.name, *known), needs)


def _forward(p: Problem, engine: str) -> tuple[Tensor, ...]:
    rows = engines.computation(engine, p).forward(p)
    return (rows.loss, *rows.saved)


def _forward_with_gradients(
    p: Problem, engine: str, row_weight: float, needs: list[bool]
) -> tuple[Tensor, ...]:
    found = engines.computation(engine, p).forward_with_gradients(p, row_weight, Needs(*needs))
    return (found[0], *_tensors(found[1], p))


def _backward(
    p: Problem, engine: str, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: list[bool]
) -> tuple[Tensor, ...]:
    computation = engines.computation(engine, p)
    return _tensors(computation.backward(p, (logsumexp, mass), row_weights, Needs(*needs)), p)


def _fake_forward(p: Problem, engine: str) -> tuple[Tensor, ...]:
    N = p.queries.shape[0]
    return tuple(p.queries.new_empty(N, dtype=torch.float64) for _ in range(3))


def _fake_forward_with_gradients(
    p: Problem, engine: str, row_weight: float, needs: list[bool]
) -> tuple[Tensor, ...]:
    return (p.queries.new_empty((), dtype=loss_dtype(p.queries)), *_fake_gradients(p, needs))


def _fake_backward(
    p: Problem, engine: str, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: list[bool]
) -> tuple[Tensor, ...]:
    return _fake_gradients(p, needs)


def _fake_gradients(p: Problem, needs: list[bool]) -> tuple[Tensor, ...]:
    found = (
        torch.empty(x.shape, dtype=x.dtype, device=x.device) if need and x is not None else None
        for x, need in zip(p.inputs(), needs, strict=True)
    )
    return _tensors(Gradients(*found), p)


def _tensors(gradients: tuple[Tensor | None, ...], p: Problem) -> tuple[Tensor, ...]:
    """One tensor a gradient, of the input's dtype and device, and empty where none is wanted."""
    return tuple(
        p.queries.new_empty(0) if g is None or x is None else g.to(x)
        for g, x in zip(gradients, p.inputs(), strict=True)
    )


def _wanted(found: list[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
    """What `_tensors` has made, with None where it is empty."""
    return tuple(g if need else None for g, need in zip(found, needs, strict=True))


def _flat(p: Problem) -> tuple[Any, ...]:
    """A problem as the operators take it."""
    t = p.targets
    scale = p.scale
    if not isinstance(scale, Tensor):
        scale = torch.tensor(scale, dtype=torch.float64, device="cpu")
    memory = (p.memory, None) if isinstance(p.memory, str) else (None, p.memory)
    return (
        *(p.queries, p.candidates, p.negatives, p.row_negatives, scale),
        *(t.starts, t.columns, t.weights, t.dense, t.background),
        *(p.diagonal, p.query_groups, p.candidate_groups, p.mask, *memory, p.partners, p.mix),
        *(p.bias, p.link, p.normalize, p.row_scores),
    )


class _OfProblem(Protocol):
    def __call__(self, p: Problem, *rest: Any) -> tuple[Tensor, ...]: ...


def _flattened(function: _OfProblem) -> Callable[..., tuple[Tensor, ...]]:
    """The function with its problem laid out flat, as operators take it."""

    def flattened(*args: Any) -> tuple[Tensor, ...]:
        queries, candidates, negatives, row_negatives, scale = args[:5]
        *of_scores, memory, memory_bytes, partners, mix = args[10:18]
        bias, link, normalize, row_scores = args[18:_PROBLEM_SIZE]
        diagonal, query_groups, candidate_groups, mask = of_scores
        p = Problem(
            *(queries, candidates, negatives, row_negatives, scale),
            targets=TargetRows(*args[5:10]),
            diagonal=diagonal,
            query_groups=query_groups,
            candidate_groups=candidate_groups,
            mask=mask,
            memory=memory_bytes if memory is None else memory,
            partners=partners,
            mix=mix,
            bias=bias,
            link=link,
            normalize=normalize,
            row_scores=row_scores,
        )
        return function(p, *args[_PROBLEM_SIZE:])

    return flattened


def _register(name: str, schema: str, function: _OfProblem, fake: _OfProblem) -> None:
    torch.library.define(f"fastqt::{name}", schema)
    torch.library.impl(f"fastqt::{name}", "CompositeExplicitAutograd", _flattened(function))
    torch.library.register_fake(f"fastqt::{name}", _flattened(fake))


_register(
    "contrastive_forward",
    f"({_PROBLEM}, str engine) -> (Tensor loss, Tensor logsumexp, Tensor mass)",
    _forward,
    _fake_forward,
)
_register(
    "contrastive_forward_with_gradients",
    f"({_PROBLEM}, str engine, float row_weight, bool[7] needs) -> (Tensor total, {_GRADIENTS})",
    _forward_with_gradients,
    _fake_forward_with_gradients,
)
_register(
    "contrastive_backward",
    f"({_PROBLEM}, str engine, Tensor logsumexp, Tensor mass, Tensor row_weights, bool[7] needs) "
    f"-> ({_GRADIENTS})",
    _backward,
    _fake_backward,
)
