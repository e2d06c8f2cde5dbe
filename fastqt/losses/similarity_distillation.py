"""Distillation of all scores of a teacher, from inner products of columns in place of the scores."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fastqt.arguments import Argument, OwnRows, Rows
from fastqt.devices import accumulation_dtype
from fastqt.distributed.batch import Batch
from fastqt.distributed.group import GroupLike
from fastqt.loss import Arguments, loss
from fastqt.losses.grams import gram, scores
from fastqt.problem import loss_dtype, unit_rows

TeacherEmbeddings = Annotated[Tensor, Argument(like="embeddings")]
TeacherCandidates = Annotated[Tensor, Argument(like="candidates")]


@loss("SimilarityDistillationLoss")
def similarity_distillation_loss(
    call: Arguments,
    embeddings: Rows,
    teacher_embeddings: TeacherEmbeddings,
    *,
    candidates: OwnRows | None = None,
    teacher_candidates: TeacherCandidates | None = None,
    normalize: bool = True,
    group: GroupLike | None = None,
) -> Tensor:
    """The mean of (x_i y_j - t_i u_j)^2 over all pairs of rows: a student's scores are to be its teacher's.

    x are the student's embeddings and t the teacher's, y and u those of the candidates, which by default are
    x and t themselves. The teacher may have another width, and only scores are compared, which a rotation of
    the embeddings does not change.

    With more pairs than a few matrices of D x D have cells, the sum is |X^T X|^2 + |T^T T|^2 - 2 |X^T T|^2,
    or with candidates the inner products of such matrices. Their difference is small once a student has
    learnt, so they and the gradients are added up in float64; on a device without float64 the loss keeps
    digits down to a few 1e-6 of the mean squared score. Five products of N x D x D give loss and gradients,
    and no gradient is computed for the teacher.

    Args:
        embeddings: (N, D) floating point, of the student.
        teacher_embeddings: (N, E) floating point on their device, of the same N texts; E and the dtype may be
            others.
        candidates, teacher_candidates: (M, D) and (M, E), give both or neither. Scores are then those of
            embeddings with candidates.
        normalize: score by cosine, otherwise by the inner product, on both sides.
        group: as of `contrastive_loss`. The rows of all ranks are one batch. What travels are D x (D + 2 E)
            sums at most, or all rows where these are few; and no gradients.

    Returns:
        A scalar, of the whole batch; float64 for float64 embeddings, float32 otherwise.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> embeddings, teacher = torch.randn(8, 16, requires_grad=True), torch.randn(8, 32)
        >>> fastqt.similarity_distillation_loss(embeddings, teacher).backward()
        >>> fastqt.similarity_distillation_loss(torch.eye(4), 2 * torch.eye(4, 6)).item()  # the same cosines
        0.0
        >>> queries, documents = torch.eye(2), torch.ones(3, 2)
        >>> fastqt.similarity_distillation_loss(
        ...     queries, queries, candidates=documents, teacher_candidates=0 * documents, normalize=False
        ... ).item()
        1.0

    Source: the similarity loss of Zhang et al., "Jasper and Stella" (2024); similar to Tung and Mori,
    "Similarity-preserving knowledge distillation" (2019), who divide by the norms of rows of scores.
    """
    dtype = loss_dtype(embeddings)
    side = _side("rows", embeddings, teacher_embeddings, dtype, normalize)
    others = None
    if candidates is not None and teacher_candidates is not None:
        others = _side("candidates", candidates, teacher_candidates, dtype, normalize)
    return _mean(call.batch, side, others).to(dtype)


class _Side(NamedTuple):
    """Rows of the student and of the teacher, (n, D) and (n, E), and the name of their number."""

    student: Tensor
    teacher: Tensor
    name: str


def _side(name: str, student: Tensor, teacher: Tensor, dtype: torch.dtype, normalize: bool) -> _Side:
    student, teacher = student.to(dtype), teacher.detach().to(dtype)
    if normalize:
        student, teacher = unit_rows(student), unit_rows(teacher)
    return _Side(student, teacher, name)


def _mean(batch: Batch, rows: _Side, others: _Side | None) -> Tensor:
    N, M = batch.total(rows.name), batch.total((others or rows).name)
    width = max(rows.student.shape[1], rows.teacher.shape[1])
    # The sums of columns are some four matrices of float64, or eight of float32.
    total = _of_scores(batch, rows, others) if 4 * width**2 >= N * M else _of_columns(batch, rows, others)
    return total / (N * M)


def _of_scores(batch: Batch, rows: _Side, others: _Side | None) -> Tensor:
    """The sum of the squared differences of scores, from the scores."""
    student, teacher = (batch.gather_replicated(x, rows.name) for x in rows[:2])
    if others is None:
        differences = gram(student.T) - gram(teacher.T)
    else:
        of_student, of_teacher = (batch.gather_replicated(x, others.name) for x in others[:2])
        differences = scores(student, of_student) - scores(teacher, of_teacher)
    return differences.square().sum(dtype=accumulation_dtype(student.device))


def _of_columns(batch: Batch, rows: _Side, others: _Side | None) -> Tensor:
    """The same from the columns' inner products.

    With A = X^T X, B = X^T T and C = T^T T of both sides the sum is <A, A'> + <C, C'> - 2 <B, B'>.
    """
    dtype = accumulation_dtype(rows.student.device)

    def products(side: _Side) -> tuple[Tensor, Tensor, Tensor]:
        of_student = batch.sum_replicated(gram(side.student, side.teacher, dtype))
        of_teacher = batch.sum_replicated(gram(side.teacher, None, dtype))
        D = side.student.shape[1]
        return of_student[:, :D], of_student[:, D:], of_teacher

    A, B, C = products(rows)
    of_others = (A, B, C) if others is None else products(others)
    parts = [(x * y).sum() for x, y in zip((A, B, C), of_others, strict=True)]
    # Below what rounding leaves of it, the difference may be less than 0.
    return (parts[0] + parts[2] - 2 * parts[1]).clamp(min=0)
