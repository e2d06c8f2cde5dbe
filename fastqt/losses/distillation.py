"""Distillation: a student's softmax over candidates beside that of a teacher's embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fastqt.arguments import Argument, OwnRows, Positive, Rows, Scale
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.engines.own_products import read_in
from fastqt.loss import Arguments, loss
from fastqt.losses.scored import ScoreOperator, ScoreProblem, embeddings_of, scores_of
from fastqt.options import Reduction

TeacherQueries = Annotated[Tensor, Argument(like="queries")]
TeacherCandidates = Annotated[Tensor, Argument(like="candidates")]


@loss("DistillationLoss")
def distillation_loss(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    teacher_queries: TeacherQueries,
    teacher_candidates: TeacherCandidates,
    *,
    scale: Scale = 20.0,
    teacher_scale: Positive = 20.0,
    normalize: bool = True,
    cross_entropy: bool = False,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Kullback-Leibler divergence of each query's softmax over the candidates from that of a teacher.

    With scores S = scale * cosine of the student's embeddings, and R = teacher_scale * cosine of the
    teacher's, the loss of row i is sum_j T_ij (log T_ij - log P_ij), where P and T are the softmaxes of the
    rows of S and R. It is 0 where the student agrees with the teacher, and keeps its digits near there. No
    gradient flows to the teacher. Both matrices are made in chunks of rows, on any device:
    three products of the student's width, and one of the teacher's.

    Args:
        queries: (N, D) floating point; float16 and bfloat16 are computed in float32.
        candidates: (M, D), dtype and device as `queries`.
        teacher_queries, teacher_candidates: (N, D') and (M, D') on the same device, of a width and a dtype of
            their own: the teacher's embeddings of the same texts.
        scale: 1 / temperature of the student, a number or 0-d tensor (differentiable).
        teacher_scale: 1 / temperature of the teacher.
        normalize: score by cosine; otherwise by inner product.
        cross_entropy: the loss is -sum_j T_ij log P_ij, which has the same gradients, and the teacher's
            entropy where the student agrees.
        reduction: "mean" over the rows, "sum", or "none".
        group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise. It is
        differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> texts, images = torch.randn(2, 8, 16)
        >>> of_teacher = torch.randn(2, 8, 32)
        >>> fastqt.distillation_loss(texts, images, *of_teacher).shape
        torch.Size([])
        >>> fastqt.distillation_loss(texts, images, texts, images).item()
        0.0

    Source: Hinton, Vinyals and Dean, "Distilling the knowledge in a neural network" (2015); for both
    directions of image and text Yang et al., "CLIP-KD" (2024), eq. 3 to 5, and open_clip's DistillClipLoss.
    """
    batch = call.batch
    columns = batch.gather(candidates, "candidates")
    teacher = teacher_queries.detach(), batch.gather_constant(teacher_candidates.detach(), "candidates")

    def problem(f: Tensor, g: Tensor) -> DistillationProblem:
        student = f, g, scale, read_in(queries)
        u, v = embeddings_of(call, *teacher)
        reads = read_in(teacher_queries)
        return DistillationProblem(*student, u, v, float(teacher_scale), cross_entropy, reads)

    return DISTILLATION.loss(call, queries, columns, problem, scale)


@dataclass
class DistillationProblem(ScoreProblem):
    """A student's queries against its candidates, and the same of a teacher."""

    teacher_queries: Tensor  # (N, D')
    teacher_candidates: Tensor  # (M, D')
    teacher_scale: float
    cross_entropy: bool  # the loss is not less by the teacher's entropy
    teacher_reads: str  # the dtype in which products read what the teacher has


def _divergence(
    p: DistillationProblem, rows: slice, scores: Tensor, wants_derivatives: bool
) -> tuple[Tensor, Tensor]:
    """sum_j T (log T - log P) of each row, and its derivative P - T with respect to the scores.

    With u = log T - log P the sum is that of T (exp(-u) - 1 + u) too, since both softmaxes sum to 1. No term
    of it is negative, and an error of u counts u times, so that its digits are kept where all u are small.
    """
    dtype = accumulation_dtype(scores.device)
    log_P = scores.log_softmax(1)
    of_teacher = p.teacher_queries[rows], p.teacher_candidates
    log_T = scores_of(*of_teacher, p.teacher_scale, p.teacher_reads).log_softmax(1)

    u, T = log_T - log_P, log_T.exp()
    # exp(-u) may overflow where T is small, and P is not.
    near, far = u.neg().expm1_().mul_(T), log_P.exp_().sub_(T)
    d_scores = torch.where(u > -1, near, far)
    losses = u.mul_(T).add_(d_scores).sum(1, dtype=dtype)
    if p.cross_entropy:
        losses -= T.mul_(log_T).sum(1, dtype=dtype)
    return losses, d_scores


DISTILLATION = ScoreOperator("distillation", DistillationProblem, _divergence)
