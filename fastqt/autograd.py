"""The contrastive loss as an autograd function over two opaque operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastqt import schedule
from fastqt.problem import Problem
from fastqt.schedule import Gradients, Needs
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
    scale = p.scale if isinstance(p.scale, Tensor) else None
    inputs = (p.queries, p.candidates, p.negatives, p.row_negatives, scale, p.bias)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    apply: Callable[..., Tensor] = _ContrastiveLoss.apply  # torch gives `apply` no types
    return apply(p, reduction, backend, needs, *inputs)


class _ContrastiveLoss(torch.autograd.Function):
    """A scalar loss takes its gradients in the forward pass, as the scores are at hand there;
    otherwise they are computed from the saved log-sum-exp once the upstream gradient is known.
    """

    @staticmethod
    def forward(
        ctx: Any, p: Problem, reduction: str, backend: str, needs: list[bool], *inputs: Tensor | None
    ) -> Tensor:
        loss: Tensor
        in_one_walk = p.memory == "fast" or p.link == "sigmoid" or backend != "cpu"
        at_once = reduction != "none" and in_one_walk
        now = needs if at_once else [False] * 6
        if _is_traced(p):
            loss, *rest = torch.ops.fastqt.contrastive_forward(*_flat(p), reduction, now)
        else:
            loss, *rest = _forward(_engine(backend), p, reduction, now)
        logsumexp, mass, *gradients = rest
        ctx.problem, ctx.reduction, ctx.backend, ctx.needs = p, reduction, backend, needs
        # Dynamo traces no tensor kept on ctx itself.
        ctx.gradients = gradients if at_once and not torch.compiler.is_compiling() else None
        ctx.saves_gradients = at_once and torch.compiler.is_compiling()
        ctx.save_for_backward(*inputs, logsumexp, mass, *(gradients if ctx.saves_gradients else ()))
        return loss

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fastqt.contrastive_loss is differentiable once; for a double backward "
                "(create_graph=True) use backend='reference'"
            )
        gradients = _gradients(ctx, upstream[0])
        wanted = [g if need else None for g, need in zip(gradients, ctx.needs, strict=True)]
        return (None, None, None, None, *wanted)


def _gradients(ctx: Any, upstream: Tensor) -> list[Tensor]:
    if ctx.saves_gradients:
        return [g * upstream.to(g.dtype) for g in ctx.saved_tensors[-6:]]
    if ctx.gradients is not None:
        # Handed over, not copied: a second backward through this graph computes them anew.
        gradients: list[Tensor] = ctx.gradients
        ctx.gradients = None
        # Whether there is anything to scale is not worth waiting for a GPU.
        if not upstream.is_cuda and upstream.item() == 1:
            return gradients
        return [g.mul_(upstream) for g in gradients]
    *_, logsumexp, mass = ctx.saved_tensors  # which also checks that the inputs are as they were
    N = logsumexp.shape[0]
    weight = upstream.double() / N if ctx.reduction == "mean" else upstream.double()
    known = (logsumexp, mass, weight.expand(N).contiguous(), ctx.needs)
    if _is_traced(ctx.problem):
        return list(torch.ops.fastqt.contrastive_backward(*_flat(ctx.problem), *known))
    return list(_backward(_engine(ctx.backend), ctx.problem, *known))


def _engine(backend: str) -> Any:
    """The module that walks over the score matrix: `forward`, `forward_with_gradients`, `backward`."""
    if backend == "cuda":
        from fastqt import cuda_schedule

        return cuda_schedule
    if backend == "triton":
        from fastqt import triton_schedule

        return triton_schedule
    return schedule


def _is_traced(p: Problem) -> bool:
    """Whether what is computed must be a dispatched operator, at several times a plain call's cost."""
    return torch.compiler.is_compiling() or type(p.queries) not in (Tensor, torch.nn.Parameter)


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


def _forward(engine: Any, p: Problem, reduction: str, needs: list[bool]) -> tuple[Tensor, ...]:
    N = p.queries.shape[0]
    weight = 1 / N if reduction == "mean" else 1.0
    if any(needs):
        rows, gradients = engine.forward_with_gradients(p, weight, Needs(*needs))
    else:
        rows, gradients = engine.forward(p), Gradients()
    loss = rows.loss
    if reduction != "none":
        found = loss.mean if reduction == "mean" else loss.sum
        loss = found() if rows.total is None else rows.total
    return (loss.to(_loss_dtype(p)), rows.logsumexp, rows.mass, *_tensors(gradients, p))


def _backward(
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


def _tensors(g: Gradients, p: Problem) -> tuple[Tensor, ...]:
    """One tensor a gradient, empty where it was not wanted."""
    scale = g.scale
    if scale is not None and isinstance(p.scale, Tensor):
        scale = scale.to(p.scale)
    wanted = (g.queries, g.candidates, g.negatives, g.row_negatives, scale, g.bias)
    return tuple(p.queries.new_empty(0) if x is None else x for x in wanted)


def _fake_forward(p: Problem, reduction: str, needs: list[bool]) -> tuple[Tensor, ...]:
    N = p.queries.shape[0]
    per_row = p.queries.new_empty(N, dtype=torch.float64)
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
    ("fastqt::contrastive_forward", _forward, _fake_forward),
    ("fastqt::contrastive_backward", _backward, _fake_backward),
):
    for _device, _backend in (("CPU", "cpu"), ("CUDA", "triton")):
        torch.library.impl(_name, _device, _flattened(_function, _backend))
    torch.library.register_fake(_name, _flattened(_fake))
