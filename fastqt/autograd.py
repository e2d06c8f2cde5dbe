"""The contrastive loss as an autograd function over two opaque operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastqt.checks import check_not_recorded, is_traced
from fastqt.engines import cpu as schedule
from fastqt.problem import Gradients, Needs, Problem, Rows, static_grad_scale
from fastqt.targets import TargetRows

_PROBLEM = (
    "Tensor queries, Tensor candidates, Tensor? negatives, Tensor? row_negatives, Tensor scale, "
    "Tensor? starts, Tensor? columns, Tensor? weights, Tensor? dense, Tensor? background, "
    "str diagonal, Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, str memory, "
    "Tensor? partners, float mix, Tensor? bias, str link"
)
_PROBLEM_SIZE = 19
_GRADIENTS = ", ".join(
    f"Tensor d{name}" for name in ("queries", "candidates", "negatives", "row_negatives", "scale", "bias")
)

torch.library.define(
    "fastqt::contrastive_forward",
    f"({_PROBLEM}, str reduction, bool[6] needs) "
    f"-> (Tensor loss, Tensor logsumexp, Tensor mass, {_GRADIENTS})",
)
torch.library.define(
    "fastqt::contrastive_backward",
    f"({_PROBLEM}, Tensor logsumexp, Tensor mass, Tensor row_weights, bool[6] needs) -> ({_GRADIENTS})",
)


def contrastive_loss(p: Problem, reduction: str, backend: str) -> Tensor:
    """The loss of a checked problem, reduced; differentiable once."""
    if p.targets.dense is not None:  # the kernels read a target matrix in the scores' dtype
        p = replace(p, targets=replace(p.targets, dense=p.targets.dense.to(_loss_dtype(p))))
    inputs = _inputs(p)
    wanted = [x is not None and x.requires_grad for x in inputs] if torch.is_grad_enabled() else []
    apply: Callable[..., Tensor] = _ContrastiveLoss.apply  # torch gives `apply` no types
    # Every argument takes its time, there and back: what is not given is none.
    return apply(p, (reduction, backend, Needs(*wanted)), *[x for x in inputs if x is not None])


class _ContrastiveLoss(torch.autograd.Function):
    """A scalar loss takes its gradients in the forward pass, as the scores are at hand there;
    otherwise they are computed from the saved log-sum-exp once the upstream gradient is known.
    """

    @staticmethod
    def forward(ctx: Any, p: Problem, how: tuple[str, str, Needs], *inputs: Tensor) -> Tensor:
        loss: Tensor
        reduction, backend, needs = how
        in_one_walk = p.memory == "fast" or p.link == "sigmoid" or backend != "cpu"
        at_once = reduction != "none" and in_one_walk and True in needs
        ctx.problem, ctx.how, ctx.at_once = p, how, at_once
        ctx.gradients, ctx.saves_gradients = None, False
        if is_traced(p.queries):
            now = needs if at_once else Needs()
            loss, *rest = torch.ops.fastqt.contrastive_forward(*_flat(p), reduction, list(now))
            ctx.saves_gradients = at_once  # Dynamo traces no tensor kept on ctx itself
            ctx.save_for_backward(*inputs, *rest)
        elif at_once:
            loss, ctx.gradients = _engine(backend).forward_with_gradients(p, reduction, needs)
            ctx.save_for_backward(*inputs)
        else:
            loss, rows = _forward(_engine(backend), p, reduction)
            ctx.save_for_backward(*inputs, rows.logsumexp, rows.mass)
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_not_recorded("fastqt.contrastive_loss")
        gradients = _gradients(ctx, upstream[0])
        given = _inputs(ctx.problem)
        return (None, None, *[g for g, x in zip(gradients, given, strict=True) if x is not None])


def _gradients(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
    """Of all that can be an input, in the order of `Needs`."""
    reduction, backend, needs = ctx.how
    if ctx.saves_gradients or ctx.gradients is not None:
        gain = static_grad_scale(ctx.problem.queries.dtype, reduction)
        factor = upstream if gain == 1 else upstream / gain
    if ctx.saves_gradients:
        return _wanted((times(g, factor) for g in ctx.saved_tensors[-6:]), needs)
    if ctx.gradients is not None:
        # Handed over, not copied: a second backward through this graph computes them anew.
        gradients: tuple[Tensor | None, ...] = _in_order(ctx.gradients, ctx.problem)
        ctx.gradients = None
        # Whether there is anything to scale is not worth waiting for a GPU.
        if factor.is_cuda or factor.item() != 1:
            for g in gradients:
                if g is not None:
                    times(g, factor, out=g)
        return gradients
    p, saved = ctx.problem, ctx.saved_tensors  # which also checks that the inputs are as they were
    N = p.queries.shape[0]
    weight = upstream.double() / N if reduction == "mean" else upstream.double()
    row_weights = weight.expand(N).contiguous()
    if is_traced(p.queries):
        known = (*saved[-8:-6], row_weights, list(needs))
        return _wanted(torch.ops.fastqt.contrastive_backward(*_flat(p), *known), needs)
    engine = _engine(backend)
    if ctx.at_once:  # it had its gradients in the forward pass
        rows = engine.forward(p)
        logsumexp, mass = rows.logsumexp, rows.mass
    else:
        logsumexp, mass = saved[-2:]
    return _in_order(engine.backward(p, logsumexp, mass, row_weights, needs), p)


def times(gradient: Tensor, upstream: Tensor, out: Tensor | None = None) -> Tensor:
    """A gradient times the loss's own, which may be beyond the range of float16 as a GradScaler's is."""
    # A GPU would round a 0-d tensor to the other's dtype before it multiplies.
    factor = upstream.to(gradient.device)
    if gradient.dim():
        factor = factor.reshape(1)
    if out is not None:
        return torch.mul(gradient, factor, out=out)
    return (gradient * factor).to(gradient.dtype)


def _engine(backend: str) -> Any:
    """The module that walks over the score matrix: `forward`, `forward_with_gradients`, `backward`."""
    if backend == "cuda":
        from fastqt.engines import cuda as cuda_schedule

        return cuda_schedule
    if backend == "triton":
        from fastqt.engines import triton as triton_schedule

        return triton_schedule
    return schedule


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


def _problem(args: tuple[Any, ...]) -> Problem:
    """The inverse of `_flat`."""
    queries, candidates, negatives, row_negatives, scale = args[:5]
    diagonal, query_groups, candidate_groups, mask, memory, partners, mix, bias, link = args[10:]
    return Problem(
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


def _forward(engine: Any, p: Problem, reduction: str) -> tuple[Tensor, Rows]:
    rows: Rows = engine.forward(p)
    loss = rows.loss
    if reduction != "none":
        loss = loss.mean() if reduction == "mean" else loss.sum()
    return loss.to(_loss_dtype(p)), rows


def _traced_forward(engine: Any, p: Problem, reduction: str, needs: list[bool]) -> tuple[Tensor, ...]:
    """Loss, log-sum-exp and mass of each row, and gradients: those are found, or these."""
    nothing = p.queries.new_empty(0, dtype=torch.float64)
    if any(needs):
        loss, gradients = engine.forward_with_gradients(p, reduction, Needs(*needs))
        return (loss, nothing, torch.empty_like(nothing), *_tensors(gradients, p))
    loss, rows = _forward(engine, p, reduction)
    return (loss, rows.logsumexp, rows.mass, *_tensors(Gradients(), p))


def _traced_backward(
    engine: Any,
    p: Problem,
    logsumexp: Tensor,
    mass: Tensor,
    row_weights: Tensor,
    needs: list[bool],
) -> tuple[Tensor, ...]:
    return _tensors(engine.backward(p, logsumexp, mass, row_weights, Needs(*needs)), p)


def _loss_dtype(p: Problem) -> torch.dtype:
    return torch.promote_types(p.queries.dtype, torch.float32)


def _inputs(p: Problem) -> tuple[Tensor | None, ...]:
    """What gradients can flow to, in the order of `Needs`."""
    scale = p.scale if isinstance(p.scale, Tensor) else None
    return p.queries, p.candidates, p.negatives, p.row_negatives, scale, p.bias


def _in_order(g: Gradients, p: Problem) -> tuple[Tensor | None, ...]:
    """The gradients in the order of the function's inputs."""
    scale = g.scale
    if scale is not None and isinstance(p.scale, Tensor):
        scale = scale.to(p.scale)
    return g.queries, g.candidates, g.negatives, g.row_negatives, scale, g.bias


def _wanted(gradients: Iterable[Tensor], needs: Needs) -> tuple[Tensor | None, ...]:
    """What `_tensors` made, None where it is empty."""
    return tuple(g if need else None for g, need in zip(gradients, needs, strict=True))


def _tensors(g: Gradients, p: Problem) -> tuple[Tensor, ...]:
    """One tensor a gradient, empty where it was not wanted."""
    return tuple(p.queries.new_empty(0) if x is None else x for x in _in_order(g, p))


def _fake_forward(p: Problem, reduction: str, needs: list[bool]) -> tuple[Tensor, ...]:
    N = p.queries.shape[0]
    per_row = p.queries.new_empty(0 if any(needs) else N, dtype=torch.float64)
    loss = p.queries.new_empty(N if reduction == "none" else (), dtype=_loss_dtype(p))
    return (loss, per_row, torch.empty_like(per_row), *_fake_gradients(p, needs))


def _fake_backward(
    p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: list[bool]
) -> tuple[Tensor, ...]:
    return _fake_gradients(p, needs)


def _fake_gradients(p: Problem, needs: list[bool]) -> tuple[Tensor, ...]:
    inputs = (p.queries, p.candidates, p.negatives, p.row_negatives, p.scale, p.bias)
    return tuple(
        torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if need and isinstance(x, Tensor)
        else p.queries.new_empty(0)
        for x, need in zip(inputs, needs, strict=True)
    )


def _flattened(
    function: Callable[..., tuple[Tensor, ...]], backend: str | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """The function with its problem laid out flat, as operators take it, and with its engine, if any."""

    def flattened(*args: Any) -> tuple[Tensor, ...]:
        engine = () if backend is None else (_engine(backend),)
        return function(*engine, _problem(args[:_PROBLEM_SIZE]), *args[_PROBLEM_SIZE:])

    return flattened


for _name, _function, _fake in (
    ("fastqt::contrastive_forward", _traced_forward, _fake_forward),
    ("fastqt::contrastive_backward", _traced_backward, _fake_backward),
):
    for _device, _backend in (("CPU", "cpu"), ("CUDA", "triton")):
        torch.library.impl(_name, _device, _flattened(_function, _backend))
    torch.library.register_fake(_name, _flattened(_fake))
