"""The max-margin alternative to a softmax, a chunk of rows of scores at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import check_embeddings, check_option
from fastqt.targets import TargetRows, TargetsLike, Window, as_targets

REDUCTIONS = ("mean", "sum", "none")
CHUNK_SCORES = 2**21  # 8 MiB of float32, and two or three times that in what is made of them


def max_margin_loss(
    queries: Tensor,
    candidates: Tensor,
    targets: TargetsLike | None = None,
    *,
    margin: float = 1.0,
    diagonal: str = "exclude",
    context_size: int = 1,
    document_ids: Tensor | None = None,
    normalize: bool = False,
    reduction: str = "mean",
) -> Tensor:
    """By how much candidates that are no targets come within a margin of a query's targets, or above them.

    With scores S = queries @ candidates.T the loss of row i is the sum, over its targets p and over all
    candidates j that are neither targets of its nor i, of max(0, margin - S_ip + S_ij). Weights of targets
    play no part. In plain PyTorch, on any device: one product of N x M x D forward and three backward, each
    followed by passes over the scores, one for each target of a row.

    Args:
        queries: (N, D) floating point; float16 and bfloat16 are computed in float32.
        candidates: (M, D), dtype and device as `queries`.
        targets: as of `fastqt.contrastive_loss`, but for smoothed ones.
        margin: a finite number.
        diagonal: "exclude": candidate i is not compared with row i's targets; "keep": it is, or is one.
        context_size, document_ids: of the default targets, as of `fastqt.contrastive_loss`.
        normalize: score by cosine.
        reduction: "mean" over all N rows, "sum", or "none".

    Returns:
        A scalar, or (N,) for reduction="none"; float64 for float64 inputs, float32 otherwise. It is
        differentiable once.

    Raises:
        ValueError, TypeError: naming the argument, what is wanted and what came.

    Source: the max-margin objective that Logeswaran and Lee (arXiv:1803.02893) compare theirs with.
    """
    check_embeddings(queries=queries, candidates=candidates)
    check_option("diagonal", diagonal, ("exclude", "keep"))
    check_option("reduction", reduction, REDUCTIONS)
    if not math.isfinite(margin):
        raise ValueError(f"margin: want a finite number, got {margin}")
    if targets is None:
        targets = Window(context_size, document_ids=document_ids)
    elif document_ids is not None:
        raise ValueError("document_ids: want them in Window(..., document_ids=...) when targets are given")
    operator, N, M = as_targets(targets), len(queries), len(candidates)
    operator.check(N, M, diagonal)
    rows = operator.rows(N, M, queries.device)
    if rows.background is not None:
        raise ValueError("targets: want some candidates that are none, got smoothed targets")
    dtype = torch.promote_types(queries.dtype, torch.float32)
    queries, candidates = queries.to(dtype), candidates.to(dtype)
    if normalize:
        queries, candidates = F.normalize(queries, dim=1), F.normalize(candidates, dim=1)
    apply: Callable[..., Tensor] = _MaxMargin.apply  # torch gives `apply` no types
    losses = apply(queries, candidates, *_slots(rows, N), margin, diagonal == "exclude")
    return losses.mean() if reduction == "mean" else losses.sum() if reduction == "sum" else losses


def _slots(rows: TargetRows, N: int) -> tuple[Tensor, Tensor]:
    """Each row's target columns side by side, (N, K) int64, and which places are taken, (N, K) bool."""
    row, column, _ = rows.entries()
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


def _chunks(
    queries: Tensor, candidates: Tensor, columns: Tensor, taken: Tensor, without_diagonal: bool
) -> Iterator[_Chunk]:
    N, M = len(queries), len(candidates)
    size = max(1, CHUNK_SCORES // M)
    for begin in range(0, N, size):
        rows = slice(begin, min(begin + size, N))
        with torch.autocast(queries.device.type, enabled=False):
            scores = queries[rows] @ candidates.T
        of_targets = scores.gather(1, columns[rows])
        chunk_row, place = taken[rows].nonzero(as_tuple=True)
        scores[chunk_row, columns[rows][chunk_row, place]] = -torch.inf
        if without_diagonal and begin < M:
            scores.diagonal(begin).fill_(-torch.inf)
        yield _Chunk(rows, scores, of_targets, columns[rows], taken[rows])


class _MaxMargin(torch.autograd.Function):
    """The rows' losses, (N,). Scores are computed once more for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,  # (N, D)
        candidates: Tensor,  # (M, D)
        columns: Tensor,  # (N, K)
        taken: Tensor,  # (N, K)
        margin: float,
        without_diagonal: bool,
    ) -> Tensor:
        ctx.save_for_backward(queries, candidates, columns, taken)
        ctx.margin, ctx.without_diagonal = margin, without_diagonal
        losses = queries.new_zeros(len(queries))
        for chunk in _chunks(queries, candidates, columns, taken, without_diagonal):
            for k in range(columns.shape[1]):
                excess = (chunk.others + (margin - chunk.of_targets[:, k : k + 1])).clamp_(min=0)
                losses[chunk.rows] += excess.sum(1) * chunk.taken[:, k]
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("fastqt.max_margin_loss is differentiable once: no create_graph=True")
        queries, candidates, columns, taken = ctx.saved_tensors
        d_queries, d_candidates = torch.empty_like(queries), torch.zeros_like(candidates)
        for chunk in _chunks(queries, candidates, columns, taken, ctx.without_diagonal):
            d_scores = torch.zeros_like(chunk.others)
            for k in range(columns.shape[1]):
                within = chunk.others > chunk.of_targets[:, k : k + 1] - ctx.margin
                within &= chunk.taken[:, k : k + 1]
                d_scores += within
                d_scores.scatter_add_(
                    1, chunk.columns[:, k : k + 1], -within.sum(1, keepdim=True).to(d_scores.dtype)
                )
            d_scores *= upstream[0][chunk.rows, None]
            with torch.autocast(queries.device.type, enabled=False):
                d_queries[chunk.rows] = d_scores @ candidates
                d_candidates += d_scores.T @ queries[chunk.rows]
        return d_queries, d_candidates, None, None, None, None
