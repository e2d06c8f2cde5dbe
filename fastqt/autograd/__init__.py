"""One autograd function for all losses.

A scalar loss takes its gradients in the forward pass, while the scores are at hand; backward then only
multiplies them by the upstream gradient. With reduction="none", or where an engine needs fewer operations
that way, the forward pass saves what is known of each row and backward computes the scores once more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import unwrap_if_dead

from fastqt.autograd import transformed
from fastqt.autograd.traced import TracedEngine
from fastqt.autograd.walked import WalkedOperator
from fastqt.checks import check_backward
from fastqt.devices import accumulation_dtype, is_described, on_gpu
from fastqt.engines import Computation, Engine
from fastqt.fields import Differentiable, with_tensors, without_tensors
from fastqt.problem import Rows, loss_dtype, reduce
from fastqt.torch_modes import is_traced, is_transformed


def loss_of(
    p: Differentiable,
    reduction: str,
    computed_by: Engine | Computation,
    function: str,
    scaled_by: Engine | None = None,
) -> Tensor:
    """The reduced loss of a checked problem, differentiable once.

    Args:
        p: the problem, in a dtype that it is computed in.
        reduction: "mean", "sum" or "none".
        computed_by: an engine, or for a loss that no engine has, what computes it.
        function: the public function, which errors name.
        scaled_by: the engine that multiplies the gradients, where it is not what computes them.
    """
    recorded = is_traced(p.queries)
    traced = recorded and isinstance(computed_by, (Engine, WalkedOperator))
    computation: Computation
    if not isinstance(computed_by, Engine):
        computation = computed_by
    elif recorded:
        computation = TracedEngine(computed_by.name)
    else:
        computation, scaled_by = computed_by.computation(p), computed_by
    if is_transformed():
        return transformed.loss_of(p, reduction, computation, function)

    inputs = p.inputs()
    wanted = [x is not None and x.requires_grad for x in inputs] if torch.is_grad_enabled() else []
    if recorded and True not in wanted:  # Dynamo does not trace an autograd function of no gradients.
        return _reduced(computation.forward(p), reduction, p)

    given = [x is not None for x in inputs]
    how = _How(reduction, computation, function, p.needs_type(*wanted), given, traced, scaled_by)
    # Each argument of an autograd function costs microseconds, so absent inputs are omitted.
    tensors = [unwrap_if_dead(x) for x in inputs if x is not None]
    return (_Loss.apply if recorded else _apply)(p, how, *tensors)


def static_grad_scale(dtype: torch.dtype, reduction: str) -> float:
    """The loss scaling of gradients that are kept until the upstream gradient is known.

    The gradients of a mean over a few thousand rows are subnormal numbers of float16. No gradient scaler
    could bring their lost digits back, so they are kept 64 times as large. One above 1,023, of a loss that is
    scaled by 1, then overflows: plain PyTorch's has the range up to 65,504.
    """
    return 2.0**6 if dtype is torch.float16 and reduction == "mean" else 1.0


class _How(NamedTuple):
    """What is to be done with a problem: the arguments of `loss_of`, and what follows from them."""

    reduction: str
    computation: Computation
    function: str
    needs: Any  # of the problem's `needs_type`
    given: list[bool]  # which of the problem's inputs are there
    traced: bool  # whether a tracer is to see operators
    scaled_by: Engine | None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, p: Any, how: _How, *inputs: Tensor) -> Tensor:
        reduction, engine, _, needs, given, traced, _ = how
        in_forward = True in needs and reduction != "none" and engine.gradients_in_forward(p)
        ctx.how, ctx.in_forward = how, in_forward
        if not in_forward:
            forward = engine.forward
            if True in needs:
                forward = getattr(engine, "forward_for_backward", forward)
            rows = forward(p)
            if True in needs:
                _save(ctx, p, inputs, rows.saved)
            return _reduced(rows, reduction, p)

        grad_scale = ctx.grad_scale = static_grad_scale(p.queries.dtype, reduction)
        count = p.queries.shape[0] if reduction == "mean" else 1
        row_weight: Any = grad_scale / count
        if traced:  # Of a number that follows from the rows there would be a graph for each number of rows.
            row_weight = torch.full((), grad_scale, dtype=torch.float64, device="cpu") / count
        else:
            ctx.row_weight = row_weight
        total, found = engine.forward_with_gradients(p, row_weight, needs)
        gradients = _of_given(found, given, inputs)

        if traced:  # Dynamo cannot trace tensors that are kept on ctx.
            ctx.absent = [g is None for g in gradients]
            _save(ctx, p, inputs, [g for g in gradients if g is not None])
        else:
            ctx.gradients = gradients
            _save(ctx, p, inputs, ())
        return total if grad_scale == 1 else total / grad_scale

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward(ctx.how.function, upstream[0])
        gradients = (_kept if ctx.in_forward else _recomputed)(ctx, upstream[0])
        return (None, None, *gradients)


# What torch's `apply` calls where no transform is active, after unwrapping the inputs as `loss_of` does.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, _Loss).apply


def _reduced(rows: Rows, reduction: str, p: Differentiable) -> Tensor:
    return reduce(rows.loss, reduction).to(loss_dtype(p.queries), copy=True)


def _save(ctx: Any, p: Any, inputs: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Saves a problem for the backward pass, and more tensors after those of the problem."""
    tensors: Sequence[Tensor | None] = inputs
    if ctx.how.traced:  # Dynamo keeps the other tensors of the problem by itself.
        ctx.problem = p
    else:
        ctx.problem, tensors = without_tensors(p)
    ctx.held = len(tensors)
    ctx.save_for_backward(*tensors, *more)


def _kept(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The forward pass's gradients times the upstream gradient."""
    if ctx.how.traced:
        factor = _without(ctx.grad_scale, upstream)
        kept = iter(ctx.saved_tensors[ctx.held :])
        return [None if absent else times(next(kept), factor) for absent in ctx.absent]

    # They are handed over and not copied. A second backward through this graph repeats the computation of the
    # forward pass, so that both have the same bits.
    kept_once: list[Tensor | None] | None = ctx.gradients
    ctx.gradients = None
    gradients = _found_again(ctx) if kept_once is None else kept_once
    # On another device it is cheaper to multiply by 1 than to wait for the value.
    if upstream.is_cpu and not is_described() and upstream.item() == ctx.grad_scale:
        return gradients

    left = [g for g in gradients if g is not None]
    if on_gpu(upstream) and ctx.how.scaled_by is not None:
        left = ctx.how.scaled_by.scale_gradients(left, upstream, 1 / ctx.grad_scale)
    if left:
        factor = _without(ctx.grad_scale, upstream)
        for g in left:
            times(g, factor, out=g)
    return gradients


def _without(grad_scale: float, upstream: Tensor) -> Tensor:
    """What gradients that were kept `grad_scale` times as large are multiplied by."""
    return upstream if grad_scale == 1 else upstream / grad_scale


def _found_again(ctx: Any) -> list[Tensor | None]:
    """The gradients that the forward pass found and that a backward pass has already taken."""
    # Reading saved tensors checks that nothing has changed them in place.
    p = with_tensors(ctx.problem, ctx.saved_tensors)
    _, gradients = ctx.how.computation.forward_with_gradients(p, ctx.row_weight, ctx.how.needs)
    return _of_given(gradients, ctx.how.given, [x for x in p.inputs() if x is not None])


def _recomputed(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The gradients from the upstream gradient and what the forward pass has saved of each row."""
    reduction, engine, _, needs, _, traced, _ = ctx.how
    saved = ctx.saved_tensors  # Reading them checks that nothing has changed them in place.
    p = ctx.problem if traced else with_tensors(ctx.problem, saved[: ctx.held])
    N = p.queries.shape[0]
    weight = upstream.to(accumulation_dtype(upstream.device)) / (N if reduction == "mean" else 1)
    row_weights = weight if reduction == "none" else weight.expand(N)
    gradients = engine.backward(p, saved[ctx.held :], row_weights.contiguous(), needs)
    return _of_given(gradients, ctx.how.given, [x for x in p.inputs() if x is not None])


def _of_given(
    gradients: Sequence[Tensor | None], given: list[bool], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of the inputs that are given; a scale's, which engines give as they have it, like it."""
    return [
        g if g is None or g.dim() else g.to(x)
        for g, x in zip(compress(gradients, given), inputs, strict=True)
    ]


def times(gradient: Tensor, upstream: Tensor, out: Tensor | None = None) -> Tensor:
    """A gradient times the upstream one, whose value may exceed float16 as a GradScaler's does."""
    # A GPU would round a 0-d tensor to the other's dtype before it multiplies.
    factor = upstream.to(gradient.device)
    if gradient.dim():
        factor = factor.reshape(1)
    if out is not None:
        return torch.mul(gradient, factor, out=out)
    return (gradient * factor).to(gradient.dtype)
