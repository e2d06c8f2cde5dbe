"""The max-margin alternative to a softmax, computed on one chunk of rows of scores after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt import autograd
from fastqt.arguments import Known, OwnRows, Rows
from fastqt.autograd.walked import WalkedOperator
from fastqt.checks import require
from fastqt.distributed.group import GroupLike
from fastqt.engines.own_products import multiply, product
from fastqt.fields import Differentiable
from fastqt.functional.fitting import GivenTargets, targets_of
from fastqt.loss import Arguments, loss
from fastqt.options import MarginDiagonal, Reduction
from fastqt.targets import TargetRows, Targets, TargetsLike, given_or_window
from fastqt.torch_modes import without_autocast

Gradients: TypeAlias = tuple[Tensor | None, Tensor | None]  # in the order of MaxMarginNeeds

CHUNK_SCORES = 2**21  # 8 MiB of float32; what is computed from them takes two or three times as much


def _fit(
    targets: TargetsLike | None,
    context_size: int | None,
    document_ids: Tensor | None,
    known: Known,
) -> dict[str, Targets]:
    return {"targets": targets_of(targets, context_size, document_ids, known)}


@loss("MaxMarginLoss", check=_fit)
def max_margin_loss(
    call: Arguments,
    queries: Rows,
    candidates: OwnRows,
    targets: GivenTargets = None,
    *,
    margin: float = 1.0,
    diagonal: MarginDiagonal = "exclude",
    context_size: int | None = None,
    document_ids: Tensor | None = None,
    normalize: bool = False,
    reduction: Reduction = "mean",
    group: GroupLike | None = None,
) -> Tensor:
    """Sum of hinges: each target of a query is to score higher than every other candidate, by a margin.

    With scores S = queries @ candidates.T the loss of row i is the sum of max(0, margin - S_ip + S_ij) over
    its targets p and over all candidates j that are neither its targets nor i. The targets' weights have no
    influence. It is computed in plain PyTorch on any device: three matrix products of N x M x D give the loss
    and its gradients, and each target of a row takes passes over the scores.

    Args:
        queries: (N, D) floating point; float16 and bfloat16 are computed in float32.
        candidates: (M, D), dtype and device as `queries`.
        targets: as of `fastqt.contrastive_loss`, but for smoothed ones.
        margin: a finite number.
        diagonal: with "exclude" candidate i is not compared with row i's targets; with "keep" it is, or it
            is a target.
        context_size, document_ids: of the default targets, as of `fastqt.contrastive_loss`.
        normalize: score by cosine.
        reduction: "mean" over all N rows, "sum", or "none".
        group: as of `contrastive_loss`.

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise. It is
        differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Example:
        >>> import torch, fastqt
        >>> queries, candidates = torch.randn(2, 8, 16)  # of eight sentences in their order
        >>> fastqt.max_margin_loss(queries, candidates, context_size=1, reduction="none").shape
        torch.Size([8])
        >>> unit, own = 2 * torch.eye(4), torch.arange(4)  # each row scores 4 with its target, 0 with others
        >>> fastqt.max_margin_loss(unit, unit, own, diagonal="keep", margin=5.0).item()  # 3 (5 - 4)
        3.0

    Source: the max-margin objective that Logeswaran and Lee (arXiv:1803.02893) compare theirs with.
    """
    # A rank's own candidates come first, and with them the diagonal.
    batch = call.batch
    columns = batch.rolled(batch.gather(candidates, "candidates"))
    local = batch.targets(given_or_window(targets, None, None), candidates="candidates")
    local = batch.own_first(local, diagonal, candidates="candidates")

    def losses(part: str) -> Tensor:
        p = _problem(queries, columns, local, margin, diagonal, normalize)
        return autograd.loss_of(p, part, MAX_MARGIN, call.function)

    return batch.loss(reduction, (queries, columns), losses)


def _problem(
    queries: Tensor,
    candidates: Tensor,
    operator: Targets,
    margin: float,
    diagonal: MarginDiagonal,
    normalize: bool,
) -> MaxMarginProblem:
    N, M = len(queries), len(candidates)
    operator.check(N, M, diagonal)
    rows = operator.rows(N, M, queries.device)
    if rows.background is not None:
        raise ValueError("targets: want some candidates that are none, got smoothed targets")
    if rows.columns is not None:
        inside = ((rows.columns >= 0) & (rows.columns < M)).all()
        wanted = "targets: want columns in 0..{last}, or -100 for no target"
        require(inside, wanted, rows.columns, last=M - 1)

    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries, candidates = queries.to(dtype), candidates.to(dtype)
    if normalize:
        queries, candidates = F.normalize(queries, dim=1), F.normalize(candidates, dim=1)
    return MaxMarginProblem(
        queries=queries,
        candidates=candidates,
        starts=rows.starts,
        columns=rows.columns,
        weights=rows.weights,
        dense=rows.dense,
        margin=float(margin),
        without_diagonal=diagonal == "exclude",
    )


class MaxMarginNeeds(NamedTuple):
    """Which inputs of a `MaxMarginProblem` want a gradient."""

    queries: bool = False
    candidates: bool = False


@dataclass
class MaxMarginProblem(Differentiable):
    """Queries against candidates, with the fields of `TargetRows` that say which of these are targets."""

    queries: Tensor  # (N, D)
    candidates: Tensor  # (M, D)
    starts: Tensor | None
    columns: Tensor | None
    weights: Tensor | None
    dense: Tensor | None
    margin: float
    without_diagonal: bool

    needs_type: ClassVar[type[MaxMarginNeeds]] = MaxMarginNeeds


def _slots(p: MaxMarginProblem) -> tuple[Tensor, Tensor]:
    """Each row's target columns in K slots, (N, K) int64, and which slots are taken, (N, K) bool."""
    N = len(p.queries)
    row, column, _ = TargetRows(p.starts, p.columns, p.weights, p.dense).entries()
    counts = torch.bincount(row, minlength=N)
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    columns = column.new_zeros(N, int(counts.max()))
    columns[row, place] = column
    return columns, torch.arange(columns.shape[1], device=row.device) < counts[:, None]


class _Chunk(NamedTuple):
    rows: slice
    others: Tensor  # (C, M) scores, -inf where a candidate is a target or the row's own
    of_targets: Tensor  # (C, K) scores
    columns: Tensor  # (C, K) int64
    taken: Tensor  # (C, K) bool


def _chunks(p: MaxMarginProblem) -> Iterator[_Chunk]:
    N, M = len(p.queries), len(p.candidates)
    every_column, every_taken = _slots(p)
    size = max(1, CHUNK_SCORES // M)
    for begin in range(0, N, size):
        rows = slice(begin, min(begin + size, N))
        columns, taken = every_column[rows], every_taken[rows]
        with without_autocast(p.queries):
            scores = product(p.queries[rows], p.candidates.T)
        of_targets = scores.gather(1, columns)
        chunk_row, place = taken.nonzero(as_tuple=True)
        scores[chunk_row, columns[chunk_row, place]] = -torch.inf
        if p.without_diagonal and begin < M:
            scores.diagonal(begin).fill_(-torch.inf)
        yield _Chunk(rows, scores, of_targets, columns, taken)


def _walk(p: MaxMarginProblem, row_weights: Tensor | None, needs: MaxMarginNeeds) -> tuple[Tensor, Gradients]:
    """The loss of each row, (N,), and with weights the gradients of sum_i row_weights_i loss_i."""
    losses = p.queries.new_zeros(len(p.queries))
    d_queries = torch.empty_like(p.queries) if needs.queries else None
    d_candidates = torch.zeros_like(p.candidates) if needs.candidates else None

    for chunk in _chunks(p):
        d_scores = None if row_weights is None else torch.zeros_like(chunk.others)
        for k in range(chunk.columns.shape[1]):
            taken = chunk.taken[:, k : k + 1]
            excess = chunk.others + (p.margin - chunk.of_targets[:, k : k + 1])
            if d_scores is not None:
                within = (excess > 0) & taken
                d_scores += within
                counts = within.sum(1, keepdim=True).to(d_scores.dtype)
                d_scores.scatter_add_(1, chunk.columns[:, k : k + 1], -counts)
            losses[chunk.rows] += excess.clamp_(min=0).sum(1) * taken[:, 0]

        if d_scores is None or row_weights is None:
            continue
        d_scores *= row_weights[chunk.rows, None].to(d_scores.dtype)
        with without_autocast(p.queries):
            if d_queries is not None:
                multiply(d_queries[chunk.rows], d_scores, p.candidates)
            if d_candidates is not None:
                multiply(d_candidates, d_scores.T, p.queries[chunk.rows], add=True)
    return losses, (d_queries, d_candidates)


MAX_MARGIN = WalkedOperator("max_margin", MaxMarginProblem, _walk)
