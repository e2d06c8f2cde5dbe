"""CLIP's loss: one walk for the log-sum-exp of rows and columns, one for the gradients of both.

The walks of a CPU are C++, in csrc/cpu/clip.cpp: 8 N² D operations in all, or 6 where all scores are at hand
at once. Those of a GPU are in fastqt/triton_clip_walk.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastqt import engines as backends
from fastqt.autograd import times
from fastqt.checks import (
    check_embeddings,
    check_not_recorded,
    check_option,
    check_scale,
    input_dtype,
    is_traced,
)
from fastqt.engines import cpu as schedule
from fastqt.functional import MEMORY_MODES, REDUCTIONS
from fastqt.losses.common import unit
from fastqt.losses.info_nce import info_nce_loss
from fastqt.problem import Needs, pairs, static_grad_scale


def _loss_of_pairs(
    a: Tensor,  # (N, D)
    b: Tensor,  # the same
    scale: float | Tensor,
    reduction: str,
    memory: str,
    backend: str,  # "cpu" or "triton"
) -> Tensor:
    """The loss of pairs of rows, reduced; differentiable once in all tensors."""
    if backend == "cpu":
        a, b = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (a, b))
    apply: Callable[..., Tensor] = _Clip.apply  # torch gives `apply` no types
    return apply(torch.is_grad_enabled(), reduction, memory, backend, a, b, scale)


class _Clip(torch.autograd.Function):
    """A scalar loss takes its gradients in the forward pass, as a training wants both."""

    @staticmethod
    def forward(
        ctx: Any,
        recorded: bool,
        reduction: str,
        memory: str,
        backend: str,
        a: Tensor,
        b: Tensor,
        scale: float | Tensor,
    ) -> Tensor:
        N, needs = len(a), ctx.needs_input_grad[4:]
        ctx.needs = Needs(queries=needs[0], candidates=needs[1], scale=needs[2])
        ctx.memory, ctx.walk = memory, _walk_of(backend)
        ctx.scale = None if isinstance(scale, Tensor) else scale
        ctx.weight = 1 / N if reduction == "mean" else 1.0
        ctx.gain = static_grad_scale(a.dtype, reduction)
        found = a.new_empty(4, N, dtype=torch.float64)
        at_once = recorded and reduction != "none" and any(needs)
        weights = ctx.gain * ctx.weight if at_once else None
        gradients = ctx.walk(a, b, scale, memory, found, weights, ctx.needs, known=False)
        ctx.gradients = None if weights is None else gradients
        ctx.save_for_backward(a, b, scale if isinstance(scale, Tensor) else None, found)
        losses = found[3]
        loss = losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()
        return loss.to(torch.promote_types(a.dtype, torch.float32), copy=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_not_recorded("fastqt.clip_loss")
        (a, b, scale, found), (g,) = ctx.saved_tensors, upstream
        # Handed over, not copied: a second backward through this graph computes them anew.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            weights = (ctx.weight * g.double()).expand(len(a)).contiguous()
            given = ctx.scale if scale is None else scale
            gradients = ctx.walk(a, b, given, ctx.memory, found, weights, ctx.needs, known=True)
        elif g.is_cuda or g.item() != ctx.gain:
            for x in gradients:
                if x is not None:
                    times(x, g / ctx.gain, out=x)
        da, db, dscale = gradients
        return None, None, None, None, da, db, dscale if dscale is None else dscale.to(scale)


def _walk_of(backend: str) -> Callable[..., tuple[Tensor | None, ...]]:
    """Finds what is known of each pair, unless it is known already, and with weights the gradients."""
    if backend == "triton":
        from fastqt.engines.triton import clip as triton_clip_walk

        return triton_clip_walk.walk
    return _walk_on_cpu


def _walk_on_cpu(
    a: Tensor,
    b: Tensor,
    scale: float | Tensor,
    memory: str,
    found: Tensor,  # (4, N) float64: csrc/cpu/clip_tile.h's PairSums, and each pair's loss
    weights: float | Tensor | None,  # (N,) float64
    needs: Needs,
    *,
    known: bool,
) -> tuple[Tensor | None, ...]:
    value = scale.item() if isinstance(scale, Tensor) else scale
    if not math.isfinite(value):
        raise ValueError(f"scale: want a finite number, got {value}")
    gradients: list[Tensor | None] = [None, None, None]
    if isinstance(weights, float):
        weights = torch.full_like(found[3], weights)
    if weights is not None:
        fresh = torch.empty(a.shape, dtype=a.dtype), torch.empty(b.shape, dtype=b.dtype), found.new_empty(())
        wanted = needs.queries, needs.candidates, needs.scale
        gradients = [x if need else None for x, need in zip(fresh, wanted, strict=True)]
    torch.ops.fastqt.clip_walk_.default(
        *(a, b, value, *_tile(a, memory), known, found[:3], found[3], weights, *gradients)
    )
    return tuple(gradients)


def _tile(a: Tensor, memory: str) -> tuple[int, int]:
    """Rows and columns of scores that are at hand at once."""
    N = len(a)
    if memory == "fast" and N * N * a.element_size() <= schedule.CHUNK_BYTES:
        return N, N
    return schedule.TILE_ROWS, schedule.TILE_COLUMNS


def clip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    normalize: bool = True,
    reduction: str = "mean",
    memory: str = "fast",
    backend: str | None = None,
) -> Tensor:
    """The mean of both directions' `info_nce_loss`: a's rows among b's, and b's among a's.

    Args:
        a, b: (N, D); rows of equal index are a pair.
        scale: inverse temperature, a number or 0-d tensor (differentiable).

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021).
    """
    check_embeddings(a=a, b=b)
    if len(a) != len(b):
        raise ValueError(f"b: want a row for each of the {len(a)} rows of a, got {len(b)}")
    if normalize:
        a, b = unit(a), unit(b)
    if not is_traced(a, b):
        check_scale(scale)
        check_option("reduction", reduction, REDUCTIONS)
        check_option("memory", memory, MEMORY_MODES)
        dtype = input_dtype(a)
        inputs = a.to(dtype), b.to(dtype)
        chosen = backends.select(backend, a.device, dtype)
        if chosen == "triton":  # unless two launches do, of small problems
            chosen = backends.for_problem(chosen, backend, pairs(*inputs, scale, memory))
        if chosen in ("cpu", "triton"):
            return _loss_of_pairs(*inputs, scale, reduction, memory, chosen)
    options: dict[str, Any] = {
        "normalize": False,
        "reduction": reduction,
        "memory": memory,
        "backend": backend,
    }
    return (info_nce_loss(a, b, scale=scale, **options) + info_nce_loss(b, a, scale=scale, **options)) / 2
