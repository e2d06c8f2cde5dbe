"""Losses under the transforms of torch.func: grad, vjp, jacrev and vmap.

torch.func transforms an autograd function that has `setup_context`, but such a function costs every call ten
microseconds more. These two take the place of the one in `fastqt.autograd` while a transform is active. The
gradient is a function by itself, because torch.func transforms backward passes too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fastqt.checks import once_differentiable_error
from fastqt.devices import accumulation_dtype
from fastqt.engines import Computation
from fastqt.fields import Rest, with_tensors, without_tensors
from fastqt.problem import loss_dtype, reduce


class How(NamedTuple):
    """What is to be done with a problem without its tensors."""

    reduction: str
    engine: Computation
    function: str  # the public one, which errors name
    places: tuple[int, ...]  # of the problem's inputs among its tensors


def loss_of(p: Any, reduction: str, engine: Computation, function: str) -> Tensor:
    """As `fastqt.autograd.loss_of`, for a problem whose tensors a transform may have wrapped."""
    rest, tensors = without_tensors(p)
    free = dict(enumerate(tensors))  # One tensor may be several inputs.
    places = []
    for x in p.inputs():
        if x is not None:
            places.append(next(place for place, tensor in free.items() if tensor is x))
            del free[places[-1]]
    return _loss(rest, How(reduction, engine, function, tuple(places)), *tensors)


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(rest: Rest, how: How, *tensors: Tensor | None) -> Tensor:
        p = with_tensors(rest, tensors)
        return reduce(how.engine.forward(p).loss, how.reduction).to(loss_dtype(p.queries), copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rest, ctx.how, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        found = _gradients(ctx.rest, ctx.how, *upstream, *ctx.saved_tensors)
        gradients: list[Tensor | None] = [None] * len(ctx.saved_tensors)
        for place, gradient in zip(ctx.how.places, found, strict=True):
            gradients[place] = gradient
        return (None, None, *gradients)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rest: Rest, how: How, *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        losses = [_loss(rest, how, *one) for one in _unstacked(info.batch_size, in_dims[2:], tensors)]
        return torch.stack(losses), 0

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> NoReturn:
        raise once_differentiable_error(ctx.how.function)


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(rest: Rest, how: How, upstream: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        p = with_tensors(rest, tensors)
        N = p.queries.shape[0]
        weight = upstream.to(accumulation_dtype(p.queries.device)) / (N if how.reduction == "mean" else 1)
        inputs = p.inputs()
        needs = p.needs_type(*(x is not None for x in inputs))
        saved = how.engine.forward(p).saved
        found = how.engine.backward(p, saved, weight.expand(N).contiguous(), needs)
        return tuple(g.to(x) for g, x in zip(found, inputs, strict=True) if x is not None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.how = inputs[1]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> NoReturn:
        raise once_differentiable_error(ctx.how.function)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rest: Rest, how: How, *tensors: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        each = [_gradients(rest, how, *one) for one in _unstacked(info.batch_size, in_dims[2:], tensors)]
        stacked = tuple(torch.stack(gradients) for gradients in zip(*each, strict=True))
        return stacked, (0,) * len(stacked)


# torch gives `apply` no types.
_loss: Callable[..., Tensor] = _Loss.apply
_gradients: Callable[..., tuple[Tensor, ...]] = _Gradients.apply


def _unstacked(
    size: int, dims: tuple[int | None, ...], tensors: tuple[Tensor | None, ...]
) -> list[list[Tensor | None]]:
    """The arguments of each of `size` calls: losses are computed one after the other."""
    return [
        [x if x is None or dim is None else x.select(dim, i) for x, dim in zip(tensors, dims, strict=True)]
        for i in range(size)
    ]
