"""MixCSE's 3 N columns: one matrix product for the scores of all three blocks, two for gradients.

With rows u and v of norm 1, a mixture m_j of v_j and v_j+1 is own_j v_j + next_j v_j+1, and a_i the same
of u. So the scores of the mixed blocks are sums of two neighbouring cosines, and their gradients fold back
onto those: 6 N² D operations in all. A chunk of rows is at hand at a time, with the rows above and below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastqt.autograd import times
from fastqt.checks import check_not_recorded, input_dtype
from fastqt.losses.common import unit
from fastqt.problem import static_grad_scale

Gradients = tuple[Tensor | None, ...]  # of u, v, own and next of columns, own and next of rows, scale


@dataclass(frozen=True)
class Options:
    """What of `mixcse_loss` its three blocks depend on, and who computes them.

    Attributes:
        both: whether the third block is there.
        excluded: whether masked cells have no score, rather than 0.
        weight: added to the scores of a sentence with its own mixtures.
        backend: "cpu" or "triton".
    """

    both: bool
    excluded: bool
    weight: float
    stop_gradient: bool
    memory: str
    backend: str


def is_served(z: Tensor, memory: str, backend: str) -> bool:
    """Whether a backend has a walk for it: in Triton's low memory the few rows that are left beside sums in
    float32 would take longer than three losses."""
    if backend == "triton" and memory == "low":
        from fastqt.engines.triton.walk import LOW_BYTES, ROW_MULTIPLE

        N, D = z.shape
        return 4 * N * D + 12 * N * ROW_MULTIPLE <= LOW_BYTES
    return backend in ("cpu", "triton")


def loss_of_views(
    z1: Tensor,  # (N, D)
    z2: Tensor,
    mix: float,
    scale: float | Tensor,
    reduction: str,
    options: Options,
) -> Tensor:
    """The released form's loss of sentences whose partners are the next ones."""
    u, v = (unit(z).to(input_dtype(z)) for z in (z1, z2))
    dtype = torch.promote_types(u.dtype, torch.float32)

    def shares(z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.detach().to(dtype) if options.stop_gradient else z.to(dtype)
        norms = torch.linalg.vector_norm(z, dim=1)
        mixture = torch.linalg.vector_norm(mix * z + (1 - mix) * z.roll(-1, 0), dim=1).clamp(min=1e-12)
        return mix * norms / mixture, (1 - mix) * norms.roll(-1) / mixture

    if not isinstance(scale, Tensor):
        scale = torch.full((), scale, dtype=dtype, device=u.device)
    if options.backend == "cpu":
        u, v = u.to(dtype), v.to(dtype)
    return released_loss(u, v, shares(z2), shares(z1), scale, reduction, options)


def released_loss(
    u: Tensor,  # (N, D), rows of norm 1
    v: Tensor,  # (N, D), the same
    columns: tuple[Tensor, Tensor],  # own and next, (N,): shares of the mixtures of v, as they are at norm 1
    rows: tuple[Tensor, Tensor],  # of those of u
    scale: Tensor,  # ()
    reduction: str,
    options: Options,
) -> Tensor:
    """The loss of rows whose partners are the next ones, reduced; differentiable once in all tensors."""
    apply: Callable[..., Tensor] = _Released.apply  # torch gives `apply` no types
    return apply(torch.is_grad_enabled(), reduction, options, u, v, *columns, *rows, scale)


class _Released(torch.autograd.Function):
    """A scalar loss takes its gradients in the forward pass, as the cosines are at hand there."""

    @staticmethod
    def forward(ctx: Any, recorded: bool, reduction: str, options: Options, *inputs: Tensor) -> Tensor:
        N, needs = len(inputs[0]), ctx.needs_input_grad[3:]
        ctx.options, ctx.at_once = options, recorded and reduction != "none" and any(needs)
        ctx.save_for_backward(*inputs)
        weights = None
        if ctx.at_once:
            ctx.gain = static_grad_scale(inputs[0].dtype, reduction)
            weight = ctx.gain / N if reduction == "mean" else ctx.gain
            weights = inputs[0].new_full((N,), weight, dtype=torch.float64)
        losses, ctx.gradients = _walk(inputs, options, weights, needs)
        loss = losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
        return loss.to(torch.promote_types(inputs[0].dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_not_recorded("fastqt.mixcse_loss")
        inputs, (g,) = ctx.saved_tensors, upstream
        if ctx.at_once:
            gradients: Gradients = tuple(x if x is None else times(x, g / ctx.gain) for x in ctx.gradients)
        else:
            _, gradients = _walk(inputs, ctx.options, g.double().contiguous(), ctx.needs_input_grad[3:])
        return (None, None, None, *gradients)


def _walk(
    inputs: tuple[Tensor, ...], options: Options, weights: Tensor | None, needs: tuple[bool, ...]
) -> tuple[Tensor, Gradients]:
    """Each row's loss, (N,) float64, and with weights w the gradients of sum_i w_i loss_i that are needed."""
    # Autocast was heeded by whoever made the inputs.
    with torch.autocast(inputs[0].device.type, enabled=False):
        if options.backend == "triton":
            from fastqt.engines.triton.three_block import walk
        else:
            from fastqt.engines.cpu_three_block import walk
        return walk(inputs, options, weights, needs)
