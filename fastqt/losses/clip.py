"""CLIP: pairs of rows of equal index, each row among the other side's rows in both directions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.arguments import Known, Rows, Scale, Share
from fastqt.checks import check_backward
from fastqt.distributed import collectives
from fastqt.distributed.clip import ClipOfRanks
from fastqt.distributed.group import GroupLike
from fastqt.distributed.shards import Shards
from fastqt.engines import Engine, choose, plans
from fastqt.exclusions import ExcludeLike, Exclusions, Mask
from fastqt.functional.computed import has_a_walk_of_prefixes
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss
from fastqt.losses.debiasing import Prior, fit_prior, is_debiased
from fastqt.losses.info_nce import info_nce_loss, smoothing_loss
from fastqt.losses.leaving import leaving_pairs, takes_masks
from fastqt.losses.pair_scores import PairScores
from fastqt.matryoshka import MatryoshkaLike
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import ClipProblem, ClipSide, Needs, loss_dtype, unit_rows
from fastqt.torch_modes import input_dtype, is_traced, is_transformed


def _fit(label_smoothing: float, tau_plus: float | Tensor, exclude: Exclusions | None, known: Known) -> None:
    if label_smoothing and is_debiased(tau_plus):
        raise ValueError("tau_plus: want 0 with label_smoothing")
    if exclude is None:
        return
    if known.of_group and exclude.of(Mask) is not None:
        raise ValueError("exclude: want a filter that has both directions in a group, got a bool tensor")
    if label_smoothing:
        raise ValueError("exclude: want None with label_smoothing, which gives every candidate mass")
    exclude.turned()  # which not every filter can be


@loss("CLIPLoss", check=(_fit, fit_prior), sums_prefixes=False)
def clip_loss(
    call: Arguments,
    a: Rows,
    b: Rows,
    *,
    scale: Scale,
    normalize: bool = True,
    tau_plus: Prior = 0.0,
    label_smoothing: Share = 0.0,
    exclude: ExcludeLike | None = None,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """The mean of both directions' `info_nce_loss`: a's rows among b's, and b's among a's.

    Both directions share the products of the scores, so that it takes four matrix products and not six, and
    three where the memory holds all scores; under torch.compile the directions are computed one
    after the other.

    Args:
        a, b: (N, D); rows of equal index are a pair.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        tau_plus, label_smoothing: as of `info_nce_loss`, in both directions.
        exclude: as of `contrastive_loss`, in both directions: an id is of a row of a and of that of b, unless
            `fastqt.Same` has two. The directions are then computed one after the other, in six products,
            but on a GPU, where both are computed from one matrix of scores of up to 5,792 pairs.
        matryoshka: as of `contrastive_loss`. On a CPU the directions are then computed one after the other:
            six matrix products for any number of prefixes.
        reduction: "mean" over all pairs, "sum", or "none".
        normalize, memory, backend, group: as of `contrastive_loss`. In a group only the rows of b
            travel, and a rank with n of all N pairs takes four matrix products of n x N x D.

    Returns:
        A scalar, or (N,) for reduction="none".

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> images, texts = torch.randn(2, 8, 16)
        >>> log_scale = torch.tensor(2.66, requires_grad=True)  # the logarithm of 1 / 0.07
        >>> fastqt.clip_loss(images, texts, scale=log_scale.exp()).backward()
        >>> log_scale.grad.shape
        torch.Size([])
        >>> round(fastqt.clip_loss(torch.eye(4), torch.eye(4), scale=1.0).item(), 4)  # log(e + 3) - 1
        0.7437

    Source: Radford et al., "Learning transferable visual models from natural language supervision" (2021).
    """
    has_walk = not is_debiased(tau_plus) and has_a_walk_of_prefixes(a, backend)
    if matryoshka is not None and exclude is None and not has_walk:
        return call.sum_over_prefixes(
            lambda dim: call.to(clip_loss, a=a[:, :dim], b=b[:, :dim], matryoshka=None)
        )
    unsmoothed = _unsmoothed(call, a, b)
    if not label_smoothing:
        return unsmoothed

    def smoothing(dim: int | None) -> Tensor:
        x, y = a[:, :dim], b[:, :dim]
        return (smoothing_loss(call, x, [y]) + smoothing_loss(call, y, [x])) / 2

    return unsmoothed + call.sum_over_prefixes(smoothing)


def _unsmoothed(call: Arguments, a: Tensor, b: Tensor) -> Tensor:
    """The loss without label smoothing, by the engine's walk over both directions where it has one."""
    values = call.values
    exclude: Exclusions | None = values["exclude"]
    debiased = is_debiased(values["tau_plus"])
    if debiased and exclude is None:
        return _debiased_loss(call, a, b)
    traced = call.known.shapes is None and is_traced(a, b)
    if traced or debiased or values["matryoshka"] is not None:
        return _both_directions(call, a, b)
    if isinstance(call.batch, Shards):
        return _of_ranks(call, call.batch, a, b) if exclude is None else _both_directions(call, a, b)

    p = ClipProblem(a, b, values["scale"], values["memory"], values["normalize"])
    kind = plans.kind_of(ClipProblem, a, b, values["backend"], call.known.shapes)
    engine, dtype, computed, as_given = plans.kept(kind) or plans.plan(kind, p, values["backend"])
    if not engine.computes(p):
        return _both_directions(call, a, b)
    if exclude is not None:
        leaving = None
        if engine.masks_pairs and takes_masks(len(a), values["memory"]) and not is_transformed():
            leaving = leaving_pairs(exclude, a, b, of_cosines=p.normalize)
        if leaving is None:
            return _both_directions(call, a, b)
        p.mask, p.column_mask, p.thresholds = leaving
    if not as_given:
        p.queries, p.candidates = a.to(dtype).to(computed), b.to(dtype).to(computed)
    _normalize_for(engine, p, computed)
    return autograd.loss_of(p, values["reduction"], engine, call.function)


def _normalize_for(engine: Engine, p: ClipProblem, dtype: torch.dtype) -> None:
    """Normalises the rows of a problem for an engine that does not."""
    if p.normalize and not engine.normalizes(p, dtype):
        p.queries, p.candidates, p.normalize = unit_rows(p.queries), unit_rows(p.candidates), False


def _both_directions(call: Arguments, a: Tensor, b: Tensor) -> Tensor:
    """The loss as that of two directions, one after the other."""
    exclude: Exclusions | None = call.values["exclude"]
    rows, turned = {"rows": "rows", "candidates": "rows"}, None if exclude is None else exclude.turned()
    to_b = call.to(info_nce_loss, rows, queries=a, candidates=b, label_smoothing=0.0)
    to_a = call.to(info_nce_loss, rows, queries=b, candidates=a, label_smoothing=0.0, exclude=turned)
    return (to_b + to_a) / 2


def _debiased_loss(call: Arguments, a: Tensor, b: Tensor) -> Tensor:
    """The loss of cosines in which some of the negatives are expected to be positives."""
    pairs = PairScores(call, unit_rows(a), unit_rows(b))
    with call.batch.leaving_word():
        positive, *sums = pairs.both_directions()
        with torch.no_grad():
            _, *counts = pairs.of_nothing().both_directions()
        losses = [
            joined_loss(positive, [pairs.true_negatives(positive, [x], [count])])
            for x, count in zip(sums, counts, strict=True)
        ]
    return call.batch.reduced(torch.stack(losses).mean(0), call.values["reduction"]).to(loss_dtype(a))


def _of_ranks(call: Arguments, shards: Shards, a: Tensor, b: Tensor) -> Tensor:
    """The loss of all ranks' pairs without label smoothing."""
    values, group = call.values, shards.group
    scale, memory, normalize, reduction = (
        values[name] for name in ("scale", "memory", "normalize", "reduction")
    )
    N, ring = shards.total(), group.takes_ring(shards.total(), b)
    dtype = input_dtype(a)
    with shards.agreeing():
        # What is chosen depends on the sizes and dtypes, and no tensor of all candidates is made for that.
        stand_in = b.new_empty(1, b.shape[1]).expand(N, -1)
        rectangle = ClipProblem(a, stand_in, scale, memory, normalize, pairs=len(a))
        engine = choose(values["backend"], rectangle, dtype)
        p = ClipProblem(a, b, scale, memory, normalize)
        computed = engine.dtype_for(p, dtype)
        p.queries, p.candidates = a.to(dtype).to(computed), b.to(dtype).to(computed)
        _normalize_for(engine, p, computed)
    ranks = ClipOfRanks(shards, engine.computation(rectangle), ring)
    local = autograd.loss_of(p, "none" if reduction == "none" else "sum", ranks, call.function)
    return collectives.reduced(local, reduction, N, group)


def losses_of_directions(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    normalize: bool = False,
    counts: tuple[int, int] = (1, 1),
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor] | None:
    """The losses of a's rows among b's and of b's rows among a's, from one score matrix.

    Each is the sum over its rows, divided by a count, in `dtype` or that of accumulation. Any weights may be
    given to either, where `clip_loss` has the mean of both. None where no engine has a walk of both
    directions. Of at least two pairs, without any other check of the arguments.
    """
    if is_traced(a, b) or is_transformed():
        return None
    p = ClipProblem(a, b, scale, "fast", normalize, len(a))
    kind = plans.kind_of(ClipProblem, a, b, None)
    kind = None if kind is None else (kind, "both directions")
    engine, read, computed, _ = plans.kept(kind) or plans.plan(kind, p, None)
    if engine.eager:
        return None
    p.queries, p.candidates = a.to(read).to(computed), b.to(read).to(computed)
    _normalize_for(engine, p, computed)
    number, tensors = (1.0, (scale,)) if isinstance(scale, Tensor) else (scale, ())
    how = engine, p.normalize, number, counts
    return _losses_of_directions(how, dtype, p.queries, p.candidates, *tensors)


class _LossesOfDirections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        how: tuple[Engine, bool, float, tuple[int, int]],
        dtype: torch.dtype | None,
        a: Tensor,
        b: Tensor,
        *scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.how = engine, normalize, number, counts = how
        p = _pairs(normalize, number, a, b, scale)
        p.keeps = any(ctx.needs_input_grad)
        positive, *others = engine.computation(p).sums(p)
        leads = torch.stack(others).sub_(positive)
        ctx.save_for_backward(a, b, *others, leads, p.kept, *scale)
        # A softplus keeps the digits of a loss that has converged.
        of_rows, of_columns = (
            x.sum().div_(count).to(dtype or x.dtype)
            for x, count in zip(F.softplus(leads, threshold=50), counts, strict=True)
        )
        return of_rows, of_columns

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        check_backward("fastqt.fused", *upstream)
        engine, normalize, number, counts = ctx.how
        a, b, of_rows, of_columns, leads, kept, *scale = ctx.saved_tensors
        p = _pairs(normalize, number, a, b, scale)
        p.kept = kept
        of_losses = torch.stack([x / count for x, count in zip(upstream, counts, strict=True)])
        weights = leads.sigmoid().mul_(of_losses[:, None])
        _, _, *wanted = ctx.needs_input_grad
        gradients = engine.computation(p).gradients_from(
            p,
            ClipSide(of_rows, weights[0]),
            ClipSide(of_columns, weights[1]),
            weights.sum(0).neg_(),
            Needs(queries=wanted[0], candidates=wanted[1], scale=any(wanted[2:])),
        )
        of_scale = [None if gradients.scale is None else gradients.scale.to(x) for x in scale]
        return None, None, gradients.queries, gradients.candidates, *of_scale


def _pairs(normalize: bool, number: float, a: Tensor, b: Tensor, scale: Sequence[Tensor]) -> ClipProblem:
    return ClipProblem(a, b, scale[0] if scale else number, "fast", normalize, len(a))


# torch gives `apply` no types.
_losses_of_directions: Callable[..., tuple[Tensor, Tensor]] = _LossesOfDirections.apply
