"""CLIP: pairs of rows of equal index, each row among the other side's rows in both directions."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fastqt import autograd
from fastqt.checks import check_embeddings, check_flag, check_option, check_scale
from fastqt.distributed import collectives
from fastqt.distributed.agreement import agree_on_rows
from fastqt.distributed.clip import ClipOfRanks
from fastqt.distributed.group import Group, GroupLike
from fastqt.distributed.public import public_loss
from fastqt.distributed.shards import Shards
from fastqt.engines import Engine, choose, plans
from fastqt.losses.info_nce import info_nce_loss
from fastqt.losses.smoothing import check_label_smoothing, smoothing_loss
from fastqt.matryoshka import Matryoshka, MatryoshkaLike, prefixes_of
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import REDUCTIONS, ClipProblem, check_memory, unit_rows
from fastqt.torch_modes import input_dtype, is_traced

FUNCTION = "fastqt.clip_loss"


@public_loss
def clip_loss(
    a: Tensor,
    b: Tensor,
    *,
    scale: float | Tensor,
    normalize: bool = True,
    label_smoothing: float = 0.0,
    matryoshka: MatryoshkaLike | None = None,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """The mean of both directions' `info_nce_loss`: a's rows among b's, and b's among a's.

    Both directions share the products of the scores, so that it takes four matrix products and not six, and
    on a CPU three where the memory holds all scores; under torch.compile the directions are computed one
    after the other.

    Args:
        a, b: (N, D); rows of equal index are a pair.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        label_smoothing: as of `info_nce_loss`, in both directions.
        matryoshka: as of `contrastive_loss`. The directions are then computed one
            after the other: six matrix products for any number of prefixes.
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
    o = _Options(scale, normalize, reduction, memory, backend, matryoshka)
    if group is None:
        loss = _of_process(a, b, o)
        if not label_smoothing:
            check_label_smoothing(label_smoothing)
            return loss

    def check(n: int) -> dict[str, Hashable]:
        o.check(a)
        check_label_smoothing(label_smoothing)
        return {
            "normalize": normalize,
            "reduction": reduction,
            "label_smoothing": float(label_smoothing),
            "matryoshka": o.prefixes,
        }

    batch, (a, b) = agree_on_rows(group, FUNCTION, check, {"scale": scale}, a=a, b=b)
    if isinstance(batch, Shards):
        loss = _of_ranks(batch, a, b, o)
    if not label_smoothing:
        return loss
    spread = partial(
        smoothing_loss, label_smoothing, batch=batch, scale=scale, normalize=normalize, reduction=reduction
    )

    def smoothing(dim: int | None = None) -> Tensor:
        x, y = a[:, :dim], b[:, :dim]
        return (spread(queries=x, columns=[y]) + spread(queries=y, columns=[x])) / 2

    return loss + (smoothing() if o.prefixes is None else o.prefixes.sum(smoothing))


class _Options(NamedTuple):
    """The options of the loss beside label smoothing and the group."""

    scale: float | Tensor
    normalize: bool
    reduction: Reduction
    memory: Memory
    backend: Backend | None
    matryoshka: MatryoshkaLike | None

    @property
    def prefixes(self) -> Matryoshka | None:
        return prefixes_of(self.matryoshka)

    def check(self, a: Tensor) -> None:
        """Raises ValueError or TypeError unless all are what they have to be."""
        check_scale(self.scale, a.dtype)
        check_option("reduction", self.reduction, REDUCTIONS)
        check_memory(self.memory)
        check_flag("normalize", self.normalize)
        prefixes_of(self.matryoshka, a.shape[1])


def _of_process(a: Tensor, b: Tensor, o: _Options) -> Tensor:
    """The loss of one process's pairs without label smoothing."""
    kind = plans.kind_of(ClipProblem, a, b, o.backend)
    plan = plans.kept(kind)
    if plan is None:
        check_embeddings(a=a, b=b)
        if len(a) != len(b):
            raise ValueError(f"b: want a row for each of the {len(a)} rows of a, got {len(b)}")
    o.check(a)
    if is_traced(a, b) or o.prefixes is not None:
        return _both_directions(a, b, o)
    p = ClipProblem(a, b, o.scale, o.memory, o.normalize)
    engine, dtype, computed, as_given = plan or plans.plan(kind, p, o.backend)
    if not engine.computes(p):
        return _both_directions(a, b, o)
    if not as_given:
        p.queries, p.candidates = a.to(dtype).to(computed), b.to(dtype).to(computed)
    _normalize_for(engine, p, computed)
    return autograd.loss_of(p, o.reduction, engine, FUNCTION)


def _normalize_for(engine: Engine, p: ClipProblem, dtype: torch.dtype) -> None:
    """Normalises the rows of a problem for an engine that does not."""
    if p.normalize and not engine.normalizes(p, dtype):
        p.queries, p.candidates, p.normalize = unit_rows(p.queries), unit_rows(p.candidates), False


def _both_directions(a: Tensor, b: Tensor, o: _Options, group: Group | None = None) -> Tensor:
    """The loss as that of two directions, one after the other."""

    def one(rows: Tensor, columns: Tensor) -> Tensor:
        return info_nce_loss(
            rows,
            columns,
            scale=o.scale,
            normalize=o.normalize,
            matryoshka=o.matryoshka,
            reduction=o.reduction,
            memory=o.memory,
            backend=o.backend,
            group=group,
        )

    return (one(a, b) + one(b, a)) / 2


def _of_ranks(shards: Shards, a: Tensor, b: Tensor, o: _Options) -> Tensor:
    """The loss of all ranks' pairs without label smoothing, of checked arguments."""
    group = shards.group
    if is_traced(a, b) or o.prefixes is not None:
        return _both_directions(a, b, o, group)
    N, ring = shards.total(), group.takes_ring(shards.total(), b)
    dtype = input_dtype(a)
    with shards.agreeing():
        # What is chosen depends on the sizes and dtypes, and no tensor of all candidates is made for that.
        stand_in = b.new_empty(1, b.shape[1]).expand(N, -1)
        rectangle = ClipProblem(a, stand_in, o.scale, o.memory, o.normalize, pairs=len(a))
        engine = choose(o.backend, rectangle, dtype)
        p = ClipProblem(a, b, o.scale, o.memory, o.normalize)
        computed = engine.dtype_for(p, dtype)
        p.queries, p.candidates = a.to(dtype).to(computed), b.to(dtype).to(computed)
        _normalize_for(engine, p, computed)
    ranks = ClipOfRanks(shards, engine.computation(rectangle), ring)
    local = autograd.loss_of(p, "none" if o.reduction == "none" else "sum", ranks, FUNCTION)
    return collectives.reduced(local, o.reduction, N, group)
