"""The pairwise ranking loss of scores with labels, by one sort in place of a matrix of differences."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.arguments import Argument, Known, Scale
from fastqt.checks import FLOATING, INTEGERS, check_tensor, require
from fastqt.devices import accumulation_dtype
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import GroupLike
from fastqt.ids import as_ids
from fastqt.loss import Arguments, loss
from fastqt.problem import loss_dtype


def _as_matrix(name: str, scores: Any) -> dict[str, Tensor]:
    """Scores as embeddings of one column."""
    check_tensor(name, scores)
    if scores.dim() != 1:
        advice = "; give one score for each example, not a matrix of scores" if scores.dim() == 2 else ""
        raise ValueError(f"{name}: want shape (N,), got {tuple(scores.shape)}{advice}")
    return {name: scores[:, None]}


def _as_ranks(name: str, labels: Tensor, known: Known) -> Tensor:
    """Labels in a dtype that can be sorted."""
    check_tensor(name, labels)
    wanted, shape = known.sizes["rows"], tuple(labels.shape)
    if shape != (wanted,):
        advice = "; make them 1-D by flatten()" if labels.numel() == wanted and labels.dim() > 1 else ""
        raise ValueError(f"{name}: want shape ({wanted},), a label for each row, got {shape}{advice}")
    if labels.device != known.device:
        raise ValueError(f"{name}: want device {known.device}, got {labels.device}; move them by to()")

    if labels.dtype is torch.bool:
        return labels.long()
    if labels.dtype in INTEGERS:
        return as_ids(name, labels)
    if labels.dtype not in FLOATING:
        raise TypeError(f"{name}: want numbers of an integer or floating-point dtype, got {labels.dtype}")
    require(~labels.isnan().any(), f"{name}: want numbers, got NaN")
    return labels.detach()


def _dtype(labels: Tensor) -> str:
    return str(labels.dtype)


Scores = Annotated[Tensor, Argument(rows="rows", matrices=_as_matrix)]
Ranks = Annotated[Tensor, Argument(_as_ranks, fact=_dtype, of_each_call=True)]


@loss("LSEPLoss")
def lsep_loss(
    call: Arguments,
    scores: Scores,
    labels: Ranks,
    *,
    scale: Scale = 1.0,
    group: GroupLike | None = None,
) -> Tensor:
    """log(1 + sum exp(scale (s_j - s_i))) over all i and j for which label i is greater than label j.

    This log-sum-exp pairwise (LSEP) loss wants the scores in the order of the labels, whatever their
    distances. Equal labels make no pair. It is computed by a sort and a cumulative logsumexp, in O(N log N)
    and without an N x N matrix. What is summed up are N numbers in float64, on a device that has it, so that
    the loss of scores in the right order keeps its digits.

    Args:
        scores: (N,) floating point, one number for each example, such as the cosine of two texts.
        labels: (N,) numbers or bools on the device of `scores`; the higher label is to have the higher score.
        scale: 1 / temperature, a number or 0-d tensor (differentiable).
        group: as of `contrastive_loss`. Examples of all ranks are compared; only their scores and labels
            travel, and no gradients.

    Returns:
        A scalar, of the whole batch; float64 for float64 scores, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> labels = torch.tensor([0.9, 0.2, 0.2])
        >>> round(fastqt.lsep_loss(torch.tensor([1.0, 1.0, 1.0]), labels).item(), 4)  # log(1 + 2)
        1.0986
        >>> round(fastqt.lsep_loss(torch.tensor([2.0, 1.0, 1.0]), labels).item(), 4)  # log(1 + 2 / e)
        0.5514

    Source: Li, Song and Luo, "Improving pairwise ranking for multi-label image classification" (2017).
    """
    return ranking_loss(call.batch, scores, labels, scale).to(loss_dtype(scores))


def ranking_loss(batch: Batch, scores: Tensor, labels: Tensor, scale: float | Tensor) -> Tensor:
    """`lsep_loss` of checked scores and labels, one for each row of a batch, (), in the dtype of its sums."""
    dtype = accumulation_dtype(scores.device)
    if isinstance(scale, Tensor):
        scale = scale.to(dtype)
    scaled = batch.gather_replicated(scale * scores.to(dtype))
    return _of_all(scaled, batch.gather_constant(labels))


def _of_all(
    scores: Tensor,  # (N,), scaled
    labels: Tensor,  # (N,)
) -> Tensor:
    labels, order = labels.sort()
    scores = scores[order]
    # Of each example, the first one of a higher label; N where there is none.
    higher = torch.searchsorted(labels, labels, right=True)
    sums = (-scores).flip(0).logcumsumexp(0).flip(0)
    # Not minus infinity, of which alone torch's logsumexp has NaN for a gradient.
    no_pair = scores.new_full((1,), torch.finfo(scores.dtype).min / 1024)
    pairs = (scores + torch.cat([sums, no_pair])[higher]).logsumexp(0)
    return F.softplus(pairs, threshold=50)  # log(1 + exp(pairs)), which is exact where it is nearly 0
