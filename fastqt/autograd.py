"""The contrastive loss as an autograd function over two opaque operators."""

from __future__ import annotations

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
    "Tensor? query_groups, Tensor? candidate_groups, Tensor? mask, str diagonal"
)
_GRADIENTS = "Tensor dqueries, Tensor dcandidates, Tensor dnegatives, Tensor drow_negatives, Tensor dscale"

_OTHER_ARGUMENTS = 9  # of a problem, which have no gradient

torch.library.define(
    "fastqt::contrastive_forward",
    f"({_PROBLEM}, str reduction, bool[5] needs) "
    f"-> (Tensor loss, Tensor logsumexp, Tensor mass, {_GRADIENTS})",
)
torch.library.define(
    "fastqt::contrastive_backward",
    f"({_PROBLEM}, Tensor logsumexp, Tensor mass, Tensor row_weights, bool[5] needs) -> ({_GRADIENTS})",
)


def contrastive_loss(p: Problem, reduction: str, memory: str) -> Tensor:
    """The loss of a checked problem, reduced; differentiable once."""
    inputs = (p.queries, p.candidates, p.negatives, p.row_negatives, p.scale)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in inputs]
    t = p.targets
    # The tile kernels read a target matrix in the scores' dtype.
    dense = None if t.dense is None else t.dense.to(p.queries.dtype)
    loss: Tensor = _ContrastiveLoss.apply(  # type: ignore[no-untyped-call]
        *(reduction, memory, needs),
        *inputs,
        *(t.starts, t.columns, t.weights, dense, t.background),
        *(p.query_groups, p.candidate_groups, p.mask, p.diagonal),
    )
    return loss


class _ContrastiveLoss(torch.autograd.Function):
    """A scalar loss takes its gradients in the forward pass, as the scores are at hand there;
    otherwise they are computed from the saved log-sum-exp once the upstream gradient is known.
    """

    @staticmethod
    def forward(ctx: Any, reduction: str, memory: str, needs: list[bool], *problem: Any) -> Tensor:
        at_once = reduction != "none" and memory == "fast"
        loss: Tensor
        loss, logsumexp, mass, *gradients = torch.ops.fastqt.contrastive_forward(
            *problem, reduction, needs if at_once else [False] * 5
        )
        *tensors, ctx.diagonal = problem
        ctx.reduction, ctx.needs = reduction, needs
        # Dynamo traces no tensor kept on ctx itself.
        ctx.gradients = gradients if at_once and not torch.compiler.is_compiling() else None
        ctx.saves_gradients = at_once and torch.compiler.is_compiling()
        ctx.save_for_backward(*tensors, logsumexp, mass, *(gradients if ctx.saves_gradients else ()))
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
        return (None, None, None, *wanted, *[None] * _OTHER_ARGUMENTS)


def _gradients(ctx: Any, upstream: Tensor) -> list[Tensor]:
    if ctx.saves_gradients:
        return [g * upstream.to(g.dtype) for g in ctx.saved_tensors[-5:]]
    if ctx.gradients is not None:
        # Handed over, not copied: a second backward through this graph computes them anew.
        gradients: list[Tensor] = ctx.gradients
        ctx.gradients = None
        factor = float(upstream)
        return gradients if factor == 1 else [g.mul_(factor) for g in gradients]
    *tensors, logsumexp, mass = ctx.saved_tensors
    N = logsumexp.shape[0]
    weight = upstream.double() / N if ctx.reduction == "mean" else upstream.double()
    return list(
        torch.ops.fastqt.contrastive_backward(
            *tensors, ctx.diagonal, logsumexp, mass, weight.expand(N).contiguous(), ctx.needs
        )
    )


def _problem(args: tuple[Any, ...]) -> Problem:
    """The inverse of how `contrastive_loss` lays a problem out for the operators."""
    queries, candidates, negatives, row_negatives, scale = args[:5]
    query_groups, candidate_groups, mask, diagonal = args[10:]
    return Problem(
        *(queries, candidates, negatives, row_negatives, scale),
        targets=TargetRows(*args[5:10]),
        diagonal=diagonal,
        query_groups=query_groups,
        candidate_groups=candidate_groups,
        mask=mask,
    )


def _tensors(gradients: Gradients, p: Problem) -> tuple[Tensor, ...]:
    """One tensor a gradient, empty where it was not wanted."""
    wanted = (
        gradients.queries,
        gradients.candidates,
        gradients.negatives,
        gradients.row_negatives,
        gradients.scale,
    )
    like = (p.queries, p.queries, p.queries, p.queries, p.scale)
    return tuple(p.queries.new_empty(0) if x is None else x.to(y.dtype) for x, y in zip(wanted, like, strict=True))


def _forward(*args: Any) -> tuple[Tensor, ...]:
    *problem, reduction, needs = args
    p = _problem(tuple(problem))
    N = p.queries.shape[0]
    weight = 1 / N if reduction == "mean" else 1.0
    if any(needs):
        row_weights = torch.full((N,), weight, dtype=torch.float64)
        rows, gradients = schedule.forward_with_gradients(p, row_weights, Needs(*needs))
    else:
        rows, gradients = schedule.forward(p), Gradients()
    loss = rows.loss if reduction == "none" else rows.loss.sum() * weight
    return (loss.to(p.queries.dtype), rows.logsumexp, rows.mass, *_tensors(gradients, p))


def _backward(*args: Any) -> tuple[Tensor, ...]:
    *problem, logsumexp, mass, row_weights, needs = args
    p = _problem(tuple(problem))
    return _tensors(schedule.backward(p, logsumexp, mass, row_weights, Needs(*needs)), p)


def _fake_forward(*args: Any) -> tuple[Tensor, ...]:
    *problem, reduction, needs = args
    p = _problem(tuple(problem))
    N = p.queries.shape[0]
    per_row = p.queries.new_empty(N, dtype=torch.float64)
    loss = p.queries.new_empty(N if reduction == "none" else ())
    return (loss, per_row, torch.empty_like(per_row), *_fake_gradients(p, needs))


def _fake_backward(*args: Any) -> tuple[Tensor, ...]:
    *problem, _, _, _, needs = args
    p = _problem(tuple(problem))
    return _fake_gradients(p, needs)


def _fake_gradients(p: Problem, needs: list[bool]) -> tuple[Tensor, ...]:
    inputs = (p.queries, p.candidates, p.negatives, p.row_negatives, p.scale)
    return tuple(
        p.queries.new_empty(x.shape, dtype=x.dtype) if need and x is not None else p.queries.new_empty(0)
        for x, need in zip(inputs, needs, strict=True)
    )


torch.library.impl("fastqt::contrastive_forward", "CPU", _forward)
torch.library.impl("fastqt::contrastive_backward", "CPU", _backward)
torch.library.register_fake("fastqt::contrastive_forward", _fake_forward)
torch.library.register_fake("fastqt::contrastive_backward", _fake_backward)
