"""One autograd function for all losses, and the traced operators that torch.compile sees in its place.

A scalar loss takes its gradients in the forward pass, while the scores are at hand; backward then only
multiplies them by the upstream gradient. With reduction="none", or where an engine needs fewer operations
that way, the forward pass saves what is known of each row and backward computes the scores once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from fastqt import engines
from fastqt.checks import check_not_recorded, is_traced
from fastqt.engines import Computation
from fastqt.problem import Gradients, Needs, Problem, Rows, loss_dtype, reduce
from fastqt.targets import TargetRows


class Differentiable(Protocol):
    """A problem as the autograd function sees it."""

    queries: Tensor  # (N, D): the loss has a row for each

    def inputs(self) -> tuple[Tensor | None, ...]:
        """What gradients can flow to."""

    def needs(self) -> Any:
        """Which of these want one, as a named tuple in the same order."""


def loss_of(p: Differentiable, reduction: str, engine: str | Computation, function: str) -> Tensor:
    """The reduced loss of a checked problem, differentiable once.

    Args:
        p: the problem, in a dtype that the engine computes in.
        reduction: "mean", "sum" or "none".
        engine: the name of an engine, or for a loss that no engine has, what computes it.
        function: the public function, which errors name.
    """
    needs = p.needs()
    if not torch.is_grad_enabled():
        needs = type(needs)()
    apply: Callable[..., Tensor] = _Loss.apply  # torch gives `apply` no types
    # Each argument of an autograd function costs microseconds, so absent inputs are omitted.
    return apply(p, (reduction, engine, function, needs), *[x for x in p.inputs() if x is not None])


def static_grad_scale(dtype: torch.dtype, reduction: str) -> float:
    """The loss scaling of gradients that are kept until the upstream gradient is known.

    The gradients of a mean over a few thousand rows are subnormal numbers of float16. No gradient scaler
    could bring their lost digits back, so they are kept 64 times as large.
    """
    return 2.0**6 if dtype is torch.float16 and reduction == "mean" else 1.0


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Any, how: tuple[str, str | Computation, str, Any], *inputs: Tensor) -> Tensor:
        reduction, named, _, needs = how
        traced = isinstance(named, str) and is_traced(p.queries)
        engine = _computation(named, p, traced)
        in_forward = True in needs and reduction != "none" and engine.gradients_in_forward(p)
        ctx.problem, ctx.how, ctx.in_forward, ctx.traced = p, how, in_forward, traced
        ctx.gradients = None
        if not in_forward:
            rows = engine.forward(p)
            ctx.save_for_backward(*inputs, *rows.saved)
            return reduce(rows.loss, reduction).to(loss_dtype(p.queries), copy=True)
        grad_scale = static_grad_scale(p.queries.dtype, reduction)
        row_weight = grad_scale / p.queries.shape[0] if reduction == "mean" else grad_scale
        total, gradients = engine.forward_with_gradients(p, row_weight, needs)
        if traced:  # Dynamo cannot trace tensors that are kept on ctx.
            ctx.save_for_backward(*inputs, *[g for g in gradients if g is not None])
        else:
            ctx.gradients = gradients
            ctx.save_for_backward(*inputs)
        return total if grad_scale == 1 else total / grad_scale

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_not_recorded(ctx.how[2])
        inputs = ctx.problem.inputs()
        gradients = _kept(ctx, upstream[0]) if ctx.in_forward else None
        if gradients is None:
            gradients = _recomputed(ctx, upstream[0])
        return (None, None, *[_like(g, x) for g, x in zip(gradients, inputs, strict=True) if x is not None])


def _computation(named: str | Computation, p: Any, traced: bool) -> Computation:
    if not isinstance(named, str):
        return named
    return _Traced(named) if traced else engines.computation(named, p)


def _kept(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...] | None:
    """The forward pass's gradients times the upstream gradient; None once they have been handed over."""
    reduction, _, _, needs = ctx.how
    grad_scale = static_grad_scale(ctx.problem.queries.dtype, reduction)
    factor = upstream if grad_scale == 1 else upstream / grad_scale
    if ctx.traced:
        kept = list(ctx.saved_tensors[len(ctx.saved_tensors) - sum(needs) :])
        return tuple(times(kept.pop(0), factor) if need else None for need in needs)
    # They are handed over and not copied: a second backward through this graph computes them anew.
    gradients: tuple[Tensor | None, ...] | None = ctx.gradients
    ctx.gradients = None
    if gradients is None:
        return None
    # On a GPU it is cheaper to multiply by 1 than to wait for the value.
    if factor.is_cuda or factor.item() != 1:
        for g in gradients:
            if g is not None:
                times(g, factor, out=g)
    return gradients


def _recomputed(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients from the upstream gradient and what the forward pass has saved of each row."""
    p, (reduction, named, _, needs) = ctx.problem, ctx.how
    saved = ctx.saved_tensors  # Reading them checks that nothing has changed the inputs in place.
    N = p.queries.shape[0]
    weight = upstream.double() / N if reduction == "mean" else upstream.double()
    engine = _computation(named, p, ctx.traced)
    given = sum(x is not None for x in p.inputs())
    known = engine.forward(p).saved if ctx.in_forward else saved[given:]
    found: tuple[Tensor | None, ...] = engine.backward(p, known, weight.expand(N).contiguous(), needs)
    return found


def _like(gradient: Tensor | None, x: Tensor) -> Tensor | None:
    """A gradient in its input's dtype and on its device: engines give that of the scale as they have it."""
    if gradient is None or (gradient.dtype is x.dtype and gradient.is_cuda == x.is_cuda):
        return gradient
    return gradient.to(x)


def times(gradient: Tensor, upstream: Tensor, out: Tensor | None = None) -> Tensor:
    """A gradient times the upstream one, whose value may exceed float16 as a GradScaler's does."""
    # A GPU would round a 0-d tensor to the other's dtype before it multiplies.
    factor = upstream.to(gradient.device)
    if gradient.dim():
        factor = factor.reshape(1)
    if out is not None:
        return torch.mul(gradient, factor, out=out)
    return (gradient * factor).to(gradient.dtype)


# What torch.compile traces: an engine's three functions as opaque operators that carry its name.

_PROBLEM = (
    "Tensor queries, Tensor candidates, Tensor? negatives, Tensor? row_negatives, Tensor scale, "
    "Tensor? starts, Tensor? columns, Tensor? weights, Tensor? dense, Tensor? background, "
    "str diagonal, Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, str memory, "
    "Tensor? partners, float mix, Tensor? bias, str link"
)
_PROBLEM_SIZE = 19
_GRADIENTS = ", ".join(f"Tensor d{name}" for name in Needs._fields)


class _Traced:
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
    scale = p.scale if isinstance(p.scale, Tensor) else torch.tensor(p.scale, dtype=torch.float64)
    return (
        *(p.queries, p.candidates, p.negatives, p.row_negatives, scale),
        *(t.starts, t.columns, t.weights, t.dense, t.background),
        *(p.diagonal, p.query_groups, p.candidate_groups, p.mask, p.memory, p.partners, p.mix),
        *(p.bias, p.link),
    )


class _OfProblem(Protocol):
    def __call__(self, p: Problem, *rest: Any) -> tuple[Tensor, ...]: ...


def _flattened(function: _OfProblem) -> Callable[..., tuple[Tensor, ...]]:
    """The function with its problem laid out flat, as operators take it."""

    def flattened(*args: Any) -> tuple[Tensor, ...]:
        queries, candidates, negatives, row_negatives, scale = args[:5]
        diagonal, query_groups, candidate_groups, mask, memory, partners, mix, bias, link = args[
            10:_PROBLEM_SIZE
        ]
        p = Problem(
            *(queries, candidates, negatives, row_negatives, scale),
            targets=TargetRows(*args[5:10]),
            diagonal=diagonal,
            query_groups=query_groups,
            candidate_groups=candidate_groups,
            mask=mask,
            memory=memory,
            partners=partners,
            mix=mix,
            bias=bias,
            link=link,
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
    f"({_PROBLEM}, str engine, float row_weight, bool[6] needs) -> (Tensor total, {_GRADIENTS})",
    _forward_with_gradients,
    _fake_forward_with_gradients,
)
_register(
    "contrastive_backward",
    f"({_PROBLEM}, str engine, Tensor logsumexp, Tensor mass, Tensor row_weights, bool[6] needs) "
    f"-> ({_GRADIENTS})",
    _backward,
    _fake_backward,
)
