"""Distillation: a student's softmax over candidates beside that of a teacher's embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.arguments import Argument, OwnRows, Positive, Rows, Scale
from fastqt.autograd.walked import WalkedOperator
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.engines.chunked.walk import scale_on
from fastqt.engines.own_products import multiply_read, product_read, read_in
from fastqt.fields import Differentiable
from fastqt.loss import Arguments, loss
from fastqt.options import Reduction
from fastqt.problem import loss_dtype
from fastqt.torch_modes import without_autocast

Gradients: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None]  # in the order of DistillationNeeds

# Of the student and of the teacher each; on a CPU what is computed from them stays near the caches.
CHUNK_SCORES, CPU_CHUNK_SCORES = 2**21, 2**18
# float16 holds this many times P - T, and what is smaller keeps its digits down to 4e-9.
FLOAT16_SPREAD = 2.0**15
LEAST = 1e-30  # that float32 can be divided by


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
    teacher_columns = batch.gather_constant(teacher_candidates.detach(), "candidates")

    def losses(part: str) -> Tensor:
        dtype = loss_dtype(queries)
        sides = [x.to(dtype) for x in (queries, columns, teacher_queries.detach(), teacher_columns)]
        if normalize:
            sides = [F.normalize(x, dim=1) for x in sides]
        f, g, teacher_f, teacher_g = sides
        reads, teacher_reads = (read_in(x) for x in (queries, teacher_queries))
        p = DistillationProblem(
            f, g, scale, teacher_f, teacher_g, float(teacher_scale), cross_entropy, reads, teacher_reads
        )
        return autograd.loss_of(p, part, DISTILLATION, call.function)

    return batch.loss(reduction, (queries, columns, scale), losses)


class DistillationNeeds(NamedTuple):
    """Which inputs of a `DistillationProblem` want a gradient."""

    queries: bool = False
    candidates: bool = False
    scale: bool = False


@dataclass
class DistillationProblem(Differentiable):
    """A student's queries against its candidates, and the same of a teacher."""

    queries: Tensor  # (N, D)
    candidates: Tensor  # (M, D)
    scale: float | Tensor  # ()
    teacher_queries: Tensor  # (N, D')
    teacher_candidates: Tensor  # (M, D')
    teacher_scale: float
    cross_entropy: bool  # the loss is not less by the teacher's entropy
    reads: str  # the dtype in which products read what the student has: of 16 bits where that is as exact
    teacher_reads: str  # and what the teacher has

    needs_type: ClassVar[type[DistillationNeeds]] = DistillationNeeds


def _walk(
    p: DistillationProblem, row_weights: Tensor | None, needs: DistillationNeeds
) -> tuple[Tensor, Gradients]:
    """The loss of each row, (N,), and with weights the gradients of sum_i row_weights_i loss_i."""
    N, M, dtype = len(p.queries), len(p.candidates), accumulation_dtype(p.queries.device)
    scale = scale_on(p.queries.device, p.scale)
    losses = p.queries.new_zeros(N, dtype=dtype)
    d_queries = torch.empty_like(p.queries) if needs.queries else None
    d_candidates = torch.zeros_like(p.candidates) if needs.candidates else None
    d_scale = p.queries.new_zeros((), dtype=dtype) if needs.scale else None

    # P - T is read as a number of about 1, and the weights of rows beside the largest of them.
    spread = FLOAT16_SPREAD if p.reads == "float16" else 1.0
    largest = None if row_weights is None else row_weights.abs().amax().clamp(min=LEAST)

    size = max((CPU_CHUNK_SCORES if p.queries.is_cpu else CHUNK_SCORES) // M, 1)
    for begin in range(0, N, size):
        rows = slice(begin, min(begin + size, N))
        log_P = _scores(p.queries[rows], p.candidates, scale, p.reads).log_softmax(1)
        of_teacher = p.teacher_queries[rows], p.teacher_candidates
        log_T = _scores(*of_teacher, p.teacher_scale, p.teacher_reads).log_softmax(1)
        losses[rows], d_scores = _divergence(log_T, log_P)
        if p.cross_entropy:
            losses[rows] -= (log_T.exp() * log_T).sum(1, dtype=dtype)
        if row_weights is None or largest is None:
            continue

        d_scores *= spread
        shares = (row_weights[rows, None] / largest).to(d_scores.dtype)
        with without_autocast(p.queries):
            if d_candidates is not None:
                multiply_read(d_candidates, d_scores.T, shares * p.queries[rows], p.reads, add=True)
            if not needs.queries and not needs.scale:
                continue
            of_rows = product_read(d_scores, p.candidates, p.reads).mul_(shares)
        if d_scale is not None:
            d_scale += (of_rows * p.queries[rows]).sum(dtype=dtype)
        if d_queries is not None:
            d_queries[rows] = of_rows

    if largest is not None:
        unit = largest / spread  # of what is summed
        d_scale = None if d_scale is None else d_scale * unit
        for gradient in (d_queries, d_candidates):
            if gradient is not None:
                gradient *= (scale * unit).to(gradient.dtype)
    return losses, (d_queries, d_candidates, d_scale)


def _scores(queries: Tensor, candidates: Tensor, scale: float | Tensor, dtype: str) -> Tensor:
    """The scaled products of some queries with all candidates, of factors that are read in a dtype.

    Products of 16 bits are scaled after they are added up, and others before, with a rounding less.
    """
    rounds = getattr(torch, dtype).itemsize == 2
    with without_autocast(queries):
        products = product_read(queries if rounds else scale * queries, candidates.T, dtype)
    return scale * products if rounds else products


def _divergence(log_T: Tensor, log_P: Tensor) -> tuple[Tensor, Tensor]:
    """sum_j T (log T - log P) of each row, and its derivative P - T with respect to the scores.

    With u = log T - log P the sum is that of T (exp(-u) - 1 + u) too, since both softmaxes sum to 1. No term
    of it is negative, and an error of u counts u times, so that its digits are kept where all u are small.
    """
    T, u = log_T.exp(), log_T - log_P
    # exp(-u) may overflow where T is small, and P is not.
    d_scores = torch.where(u > -1, T * torch.expm1(-u), log_P.exp() - T)
    return (d_scores + T * u).sum(1, dtype=accumulation_dtype(T.device)), d_scores


DISTILLATION = WalkedOperator("distillation", DistillationProblem, _walk)
