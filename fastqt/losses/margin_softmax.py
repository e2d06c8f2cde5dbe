"""Softmaxes over classes in which the target's cosine is made smaller by a margin: ArcFace and CosFace.

The target's score is computed apart, and the other classes leave one logsumexp. So no matrix of scores is
formed, and the loss keeps its digits once the classes are learnt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.arguments import Ids, OwnRows, Rows, Scale, numbers
from fastqt.checks import require
from fastqt.distributed.group import GroupLike
from fastqt.exclusions import Same
from fastqt.functional import log_sum_exp
from fastqt.loss import Arguments, loss
from fastqt.losses.common import joined_loss
from fastqt.options import Backend, Memory, Reduction
from fastqt.problem import loss_dtype, reduce, unit_rows

LEAST_SINE = 1e-6  # below which an angle's gradient is not followed
Angle = Annotated[float, numbers("radians from 0 to pi", lambda x: 0 <= x <= math.pi)]


@loss("CosFaceLoss")
def cosface_loss(
    call: Arguments,
    embeddings: Rows,
    weight: OwnRows,
    labels: Ids,
    *,
    scale: Scale = 64.0,
    margin: float = 0.35,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each row with its class by cosine, from whose own cosine a margin is taken off.

    With cosines c of a row with the classes' vectors, and its label y, the loss is that of a softmax of
    scale * (c_y - margin) and scale * c_j of all other classes j.

    Args:
        embeddings: (N, D) floating point.
        weight: (C, D) a learnt vector for each class, dtype and device as `embeddings`.
        labels: (N,) integers in [0, C).
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        margin: a finite number, taken off the cosine.
        reduction: "mean" over the rows, "sum", or "none".
        memory, backend: as of `contrastive_loss`. It takes four matrix products, and O(N D) for the margin.
        group: each process gives rows and classes of its own, and labels are numbered over the classes of all
            processes. Where all have the same `weight`, as under DDP, want None: rows do not depend on each
            other.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> embeddings, weight = torch.randn(8, 16), torch.randn(1000, 16)
        >>> fastqt.cosface_loss(embeddings, weight, torch.arange(8)).shape
        torch.Size([])
        >>> unit = torch.eye(4)  # log(exp(0.5) + 3) - 0.5
        >>> round(fastqt.cosface_loss(unit, unit, torch.arange(4), scale=1.0, margin=0.5).item(), 4)
        1.0366

    Source: Wang et al., "CosFace: Large margin cosine loss for deep face recognition" (2018), eq. 4.
    """

    def target(cosine: Tensor, squared_sine: Tensor) -> Tensor:
        return cosine - margin

    return _loss(call, embeddings, weight, labels, target)


@loss("ArcFaceLoss")
def arcface_loss(
    call: Arguments,
    embeddings: Rows,
    weight: OwnRows,
    labels: Ids,
    *,
    scale: Scale = 64.0,
    margin: Angle = 0.5,
    reduction: Reduction = "mean",
    memory: Memory = "fast",
    backend: Backend | None = None,
    group: GroupLike | None = None,
) -> Tensor:
    """Cross-entropy of each row with its class by cosine, to whose own angle a margin is added.

    With the angle t between a row and its class's vector, the target's cosine becomes cos(t + margin), and
    beyond t = pi - margin, from where on that would rise, cos(t) - margin * sin(margin). All else is as of
    `cosface_loss`.

    Args:
        embeddings, weight, labels, reduction, memory, backend, group: as of `cosface_loss`.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        margin: in radians, from 0 to pi; 0.5 are 28.6 degrees.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> embeddings, weight = torch.randn(8, 16), torch.randn(1000, 16)
        >>> loss = fastqt.arcface_loss(embeddings, weight, torch.arange(8))
        >>> bool(loss > fastqt.arcface_loss(embeddings, weight, torch.arange(8), margin=0.0))
        True

    Source: Deng et al., "ArcFace: Additive angular margin loss for deep face recognition" (2019), eq. 3; what
    is done beyond pi - margin is that of its released code.
    """

    def target(cosine: Tensor, squared_sine: Tensor) -> Tensor:
        sine = squared_sine.clamp(min=LEAST_SINE**2).sqrt()
        turned = cosine * math.cos(margin) - sine * math.sin(margin)
        return torch.where(cosine > -math.cos(margin), turned, cosine - margin * math.sin(margin))

    return _loss(call, embeddings, weight, labels, target)


def _loss(
    call: Arguments,
    embeddings: Tensor,
    weight: Tensor,
    classes: Tensor,
    # The target's cosine with its margin, from the cosine and the squared sine.
    target: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    batch, values = call.batch, call.values
    scale, reduction = values["scale"], values["reduction"]
    columns = batch.gather(unit_rows(weight), "weight")

    def losses(part: str) -> Tensor:
        inside = ((classes >= 0) & (classes < len(columns))).all()
        require(inside, "labels: want integers in 0..{last}", classes, last=len(columns) - 1)

        rows, of_rows = unit_rows(embeddings), classes.to(embeddings.device)
        dtype = loss_dtype(rows)
        wanted = columns[of_rows].to(dtype)
        cosines = (rows.to(dtype) * wanted).sum(1)
        # 1 - cos^2 has no digits left at a small angle, and the distance of the rows has all.
        unit, lacks = _lengths(F.normalize(embeddings.to(dtype), dim=1), dtype)
        of_class, class_lacks = _lengths(wanted, columns.dtype)
        squares = (unit - of_class).square().sum(1) + lacks + class_lacks
        others = log_sum_exp(
            rows,
            columns,
            scale=scale,
            exclude=Same(of_rows, torch.arange(len(columns), device=rows.device)),
            memory=values["memory"],
            backend=values["backend"],
        )
        return reduce(joined_loss(scale * target(cosines, squares * (1 - squares / 4)), [others]), part)

    return batch.loss(reduction, (embeddings, columns, scale), losses)


def _lengths(rows: Tensor, rounded_to: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows of norm 1 without the rounding to a dtype, and what the squared norm of each lacks of 1: 0.

    A row that was too short to be brought to norm 1 stays, and lacks the rest.
    """
    squares = rows.square().sum(1)
    is_short = squares.detach() < 1 - 16 * torch.finfo(rounded_to).eps
    unit = torch.where(is_short[:, None], rows, F.normalize(rows, dim=1))
    return unit, (1 - squares).where(is_short, 0)
