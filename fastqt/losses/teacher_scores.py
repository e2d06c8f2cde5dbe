"""Losses of the scores of each row's K candidates beside those of a teacher: softmaxes, and margins.

Of N rows there are N x K numbers, so both matrices are given, and all is computed in float64 on a device that
has it.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from fastqt.arguments import Argument, Positive, Scale, mask_of
from fastqt.checks import check_tensor, require
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.options import Reduction
from fastqt.problem import loss_dtype
from fastqt.torch_modes import is_transformed


def _as_matrix(name: str, scores: Any) -> dict[str, Tensor]:
    """The scores, if they are those of several candidates of each row."""
    check_tensor(name, scores)
    shape = tuple(scores.shape)
    if len(shape) != 2:
        raise ValueError(f"{name}: want shape (N, K), a score for each candidate of a row, got {shape}")
    if shape[1] == 1:
        raise ValueError(f"{name}: want at least K=2 candidates of each row, to compare them, got 1")
    return {name: scores}


Scores = Annotated[Tensor, Argument(rows="rows", matrices=_as_matrix)]
TeacherScores = Annotated[Tensor, Argument(like="scores", matrices=_as_matrix)]
CandidateMask = Annotated[Tensor | None, mask_of("a candidate")]


def _fit(scores: Tensor, teacher_scores: Tensor, mask: Tensor | None) -> None:
    for name, x in (("teacher_scores", teacher_scores), ("mask", mask)):
        if x is not None and x.shape != scores.shape:
            raise ValueError(f"{name}: want shape {tuple(scores.shape)} as scores, got {tuple(x.shape)}")


def _has_positives(mask: Tensor | None) -> None:
    if mask is not None:
        require(mask[:, 0].all(), "mask: want True in its first column, that of the positives")


@loss("ScoreDistillationLoss", check=_fit)
def score_distillation_loss(
    call: Arguments,
    scores: Scores,
    teacher_scores: TeacherScores,
    *,
    mask: CandidateMask = None,
    scale: Scale = 1.0,
    teacher_scale: Positive = 1.0,
    cross_entropy: bool = False,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of a softmax over each row's own candidates from that of a teacher.

    With the softmaxes P of a row of scale * scores and T of teacher_scale * teacher_scores the loss is
    sum_j T_j (log T_j - log P_j). It is 0 where the student agrees with the teacher, and keeps its digits
    near there. No gradient flows to the teacher. The scores may be of any kind, such as those of a
    cross-encoder or of MaxSim; `fastqt.candidate_scores` has those of embeddings. `distillation_loss` is the
    divergence over all candidates of a batch, without their scores.

    Args:
        scores: (N, K) floating point, those of a query with its K candidates.
        teacher_scores: (N, K) floating point on the same device, the teacher's of the same pairs; of a dtype
            of its own.
        mask: (N, K) bool, False where a row has no candidate, whose scores do not count. By default all are
            there. A row without candidates has the loss 0.
        scale: 1 / temperature of the student, a number or 0-d tensor (differentiable).
        teacher_scale: 1 / temperature of the teacher.
        cross_entropy: the loss is -sum_j T_j log P_j, which has the same gradients, and the teacher's entropy
            where the student agrees.
        reduction: "mean" over the rows, "sum", or "none".
        group: as of `contrastive_loss`. The rows of all ranks have one K. Only losses travel.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 scores, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, documents = torch.randn(8, 16), torch.randn(8, 4, 16)  # four of each query
        >>> scores = fastqt.candidate_scores(queries, documents, normalize=True)
        >>> fastqt.score_distillation_loss(scores, torch.rand(8, 4), scale=20.0).shape
        torch.Size([])
        >>> of_teacher = torch.tensor([[0.0, 0.0, 9.0]])
        >>> there = torch.tensor([[True, True, False]])  # T = (1/2, 1/2), P = (3/4, 1/4)
        >>> scores = torch.tensor([[3.0, 1.0, 9.0]]).log()
        >>> round(fastqt.score_distillation_loss(scores, of_teacher, mask=there).item(), 4)  # log(4/3) / 2
        0.1438

    Source: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network" (2015); of a query's
    passages Lin, Yang and Lin, "Distilling dense representations for ranking using tightly-coupled
    teachers" (2020).
    """
    log_P = _log_softmax(_scaled(scores, scale, mask), mask)
    log_T = _log_softmax(_scaled(teacher_scores.detach(), float(teacher_scale), mask), mask)

    # With u = log T - log P the sum is that of T (exp(-u) - 1 + u) too, since both softmaxes sum to 1. No
    # term of it is negative, so that its digits are kept where all u are small. exp(-u) may overflow where T
    # is small, and P is not.
    T, u = log_T.exp(), log_T - log_P
    excess = torch.where(u > -1, T * torch.expm1(-u.clamp(min=-1)), log_P.exp() - T)
    losses = (excess + T * u).sum(1)
    if cross_entropy:
        losses = losses - (T * log_T).sum(1)
    return call.batch.reduced(losses, reduction).to(loss_dtype(scores))


def _scaled(scores: Tensor, scale: float | Tensor, mask: Tensor | None) -> Tensor:
    """Scaled scores in the dtype of accumulation, 0 where there is no candidate, whatever was there."""
    if isinstance(scale, Tensor) and not is_transformed():  # whose tensors may be several numbers
        require(scale.isfinite(), "scale: want a finite number, which is 1 / temperature")
    exact = scores.to(accumulation_dtype(scores.device))
    return scale * (exact if mask is None else exact.masked_fill(~mask, 0))


def _log_softmax(
    scores: Tensor,  # (N, K)
    mask: Tensor | None,
) -> Tensor:
    """The logarithms of the softmax of each row over its candidates, and 0 where there is none."""
    if mask is None:
        return scores.log_softmax(1)
    # Not minus infinity: of a row that has nothing else the softmax and its gradient are NaN, which torch's
    # anomaly mode stops at, though nothing reads them.
    no_candidate = torch.finfo(scores.dtype).min / 1024
    return scores.masked_fill(~mask, no_candidate).log_softmax(1).masked_fill(~mask, 0)


@loss("MarginMSELoss", check=(_fit, _has_positives))
def margin_mse_loss(
    call: Arguments,
    scores: Scores,
    teacher_scores: TeacherScores,
    *,
    mask: CandidateMask = None,
    scale: Scale = 1.0,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Mean squared error of how far each row's positive scores above its negatives, beside a teacher's.

    The first candidate of a row is its positive. With S = scale * scores and the teacher's scores R, the loss
    of a row is the mean over its negatives j of ((S_0 - S_j) - (R_0 - R_j))^2. No gradient flows to the
    teacher. Differences are computed in float64, so they keep their digits where scores are large.

    Args:
        scores, teacher_scores: as of `score_distillation_loss`. Of a teacher whose margins m (N, K - 1) are
            known alone, the scores are `torch.nn.functional.pad(-m, (1, 0))`.
        mask: (N, K) bool, False where a row has no candidate, whose scores do not count; it has a positive.
            A row without negatives has the loss 0.
        scale: 1 / temperature of the student, a number or 0-d tensor (differentiable).
        reduction: "mean" over the rows, "sum", or "none".
        group: as of `score_distillation_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 scores, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, documents = torch.randn(8, 16), torch.randn(8, 4, 16)  # a positive, three negatives
        >>> fastqt.margin_mse_loss(fastqt.candidate_scores(queries, documents), torch.rand(8, 4)).shape
        torch.Size([])
        >>> scores, of_teacher = torch.tensor([[5.0, 1.0, 2.0]]), torch.tensor([[9.0, 4.0, 3.0]])
        >>> fastqt.margin_mse_loss(scores, of_teacher).item()  # ((4 - 5)^2 + (3 - 6)^2) / 2
        5.0

    Source: Hofstätter et al., "Improving efficient neural ranking models with cross-architecture knowledge
    distillation" (2020), eq. 3.
    """
    differences = _scaled(scores, scale, mask) - _scaled(teacher_scores.detach(), 1.0, mask)
    errors = differences[:, :1] - differences[:, 1:]
    if mask is None:
        losses = errors.square().mean(1)
    else:
        negatives = mask[:, 1:]
        losses = errors.masked_fill(~negatives, 0).square().sum(1) / negatives.sum(1).clamp(min=1)
    return call.batch.reduced(losses, reduction).to(loss_dtype(scores))
