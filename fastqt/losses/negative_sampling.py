"""Negative sampling: a sigmoid tells each query's positive from a few candidates that are drawn for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.arguments import Rows, Scale, Shared
from fastqt.autograd.walked import WalkedOperator
from fastqt.checks import INTEGERS, check_embeddings, check_tensor, require
from fastqt.devices import accumulation_dtype
from fastqt.distributed.group import GroupLike
from fastqt.fields import Differentiable
from fastqt.ids import as_ids
from fastqt.loss import Arguments, loss
from fastqt.losses.scored import Gradients, ScoreNeeds, slices
from fastqt.options import Reduction

CHUNK_BYTES = 16 * 2**20  # of gathered candidates in float64


def _fit(queries: Tensor, candidates: Tensor) -> None:
    # A rank without queries has nothing to compare the candidates with.
    check_embeddings(**({"queries": queries} if len(queries) else {}), candidates=candidates)


@loss("NegativeSamplingLoss", check=_fit)
def negative_sampling_loss(
    call: Arguments,
    queries: Rows,
    candidates: Shared,
    positives: Tensor,
    negatives: Tensor,
    *,
    scale: Scale = 1.0,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Binary cross-entropy of each query's positive and of K candidates that were drawn for it.

    With scores s = scale * <f_i, g_j> the loss of row i is -log sigmoid(s) of its positive j, plus the sum of
    -log sigmoid(-s) over its negatives j. Negatives that equal the positive are left out, as in word2vec.
    Nothing of N x M is made: the loss takes O(N K D) operations, and memory for a few rows at a time.

    Of word2vec's skip-gram the queries are the vectors of words, one row for each pair of a word and a word
    of its context; the candidates are the table of the context's vectors, the positives its words, and the
    negatives `fastqt.Noise(counts).draw(N, K)`.

    Args:
        queries: (N, D) floating point; float16 and bfloat16 are computed as float32 is, in float64 inside.
        candidates: (M, D), dtype and device as `queries`. Their gradient is a dense (M, D).
        positives: (N,) integers in [0, M).
        negatives: (N, K) integers in [0, M).
        scale: 1 / temperature, a positive number or 0-d tensor (differentiable).
        reduction: "mean" over the N rows, "sum", or "none".
        group: as of `contrastive_loss`. Each rank gives its own queries, with their positives and negatives,
            and the same candidates, whose gradient is the part of the rank's queries.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise. It is
        differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> words, contexts = torch.randn(2, 100, 16)  # two tables of word vectors
        >>> pairs = torch.randint(100, (8, 2))  # a word, and a word of its context
        >>> noise = fastqt.Noise(torch.ones(100)).draw(8, 5)
        >>> fastqt.negative_sampling_loss(words[pairs[:, 0]], contexts, pairs[:, 1], noise).shape
        torch.Size([])

    Source: Mikolov et al., "Distributed representations of words and phrases and their compositionality"
    (2013), equation 4.
    """

    def losses(part: str) -> Tensor:
        p = _problem(queries, candidates, positives, negatives, scale)
        return autograd.loss_of(p, part, NEGATIVE_SAMPLING, call.function)

    return call.batch.loss(reduction, (queries, candidates, scale), losses)


def _problem(
    queries: Tensor, candidates: Tensor, positives: Tensor, negatives: Tensor, scale: float | Tensor
) -> NegativeSamplingProblem:
    N, M = len(queries), len(candidates)
    positives = as_ids("positives", positives).to(queries.device)
    if len(positives) != N:
        raise ValueError(f"positives: want one for each of N={N} queries, got {len(positives)}")
    check_tensor("negatives", negatives)
    if negatives.dim() != 2 or len(negatives) != N:
        raise ValueError(f"negatives: want shape ({N}, K), got {tuple(negatives.shape)}")
    if negatives.dtype not in INTEGERS:
        raise TypeError(f"negatives: want an integer dtype, got {negatives.dtype}")

    cells = torch.cat([positives[:, None], negatives.to(queries.device).long()], 1)
    inside = (cells >= 0) & (cells < M)
    require(inside.all(), "positives, negatives: want values in 0..{last}", cells, last=M - 1)
    dtype = torch.promote_types(queries.dtype, torch.float32)
    if not isinstance(scale, Tensor):
        # As a product: in that a tracer keeps a number as a variable, and elsewhere as a constant.
        scale = torch.ones((), dtype=accumulation_dtype(queries.device), device=queries.device) * scale
    return NegativeSamplingProblem(queries.to(dtype), candidates.to(dtype), scale.to(queries.device), cells)


@dataclass
class NegativeSamplingProblem(Differentiable):
    """Queries, each against the candidates that are named for it."""

    queries: Tensor  # (N, D)
    candidates: Tensor  # (M, D)
    scale: Tensor  # ()
    cells: Tensor  # (N, 1 + K) int64: the positive of each row, and its negatives

    needs_type: ClassVar[type[ScoreNeeds]] = ScoreNeeds


def _walk(
    p: NegativeSamplingProblem, row_weights: Tensor | None, needs: ScoreNeeds
) -> tuple[Tensor, Gradients]:
    """The loss of each row, (N,) float64, and with weights the gradients of sum_i row_weights_i loss_i.

    Scores are summed in float64: the gradient of a positive that is told from all negatives is the
    exponential of minus its score, of which float32 would lose digits.
    """
    dtype = accumulation_dtype(p.queries.device)
    losses = p.queries.new_zeros(len(p.queries), dtype=dtype)
    d_queries = torch.empty_like(p.queries) if needs.queries else None
    d_candidates = torch.zeros_like(p.candidates) if needs.candidates else None
    d_scale = torch.zeros((), dtype=dtype, device=p.queries.device) if needs.scale else None

    N, cells_of_a_row = p.cells.shape
    for rows in slices(N, max(CHUNK_BYTES // (cells_of_a_row * p.queries.shape[1] * 8), 1)):
        f, cells = p.queries[rows].to(dtype), p.cells[rows]
        g = p.candidates[cells].to(dtype)
        products = (g @ f[:, :, None]).squeeze(2)

        # The sign with which a cell's score lowers its loss: +1 of the positive, -1 of negatives, 0 of none.
        signs = -(cells != cells[:, :1]).to(dtype)
        signs[:, 0] = 1
        scores = signs * p.scale.to(dtype) * products
        losses[rows] = -(F.logsigmoid(scores) * signs.abs()).sum(1)
        if row_weights is None:
            continue

        d_products = -signs * torch.sigmoid(-scores) * row_weights[rows, None]
        if d_scale is not None:
            d_scale += (d_products * products).sum()
        d_products *= p.scale.to(dtype)
        if d_queries is not None:
            d_queries[rows] = (d_products[:, None] @ g).squeeze(1).to(d_queries.dtype)
        if d_candidates is not None:
            parts = (d_products[:, :, None] * f[:, None]).flatten(0, 1)
            d_candidates.index_add_(0, cells.flatten(), parts.to(d_candidates.dtype))
    return losses, (d_queries, d_candidates, d_scale)


NEGATIVE_SAMPLING = WalkedOperator("negative_sampling", NegativeSamplingProblem, _walk)
