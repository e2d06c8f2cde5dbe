"""The max-margin alternative to a softmax, computed on some rows of scores at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fastqt.arguments import OwnRows, Rows
from fastqt.checks import require
from fastqt.distributed.group import GroupLike
from fastqt.functional.fitting import GivenTargets, fit_targets
from fastqt.loss import Arguments, loss
from fastqt.losses.scored import ScoreOperator, ScoreProblem
from fastqt.options import MarginDiagonal, Reduction
from fastqt.targets import TargetRows, Targets, given_or_window


@loss("MaxMarginLoss", check=fit_targets)
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

    def problem(f: Tensor, g: Tensor) -> MaxMarginProblem:
        of_rows = _target_rows(local, len(f), len(g), f.device, diagonal)
        parts = of_rows.starts, of_rows.columns, of_rows.weights, of_rows.dense
        reads = str(f.dtype).removeprefix("torch.")
        return MaxMarginProblem(f, g, 1.0, reads, *parts, float(margin), diagonal == "exclude")

    return MAX_MARGIN.loss(call, queries, columns, problem)


def _target_rows(
    targets: Targets, N: int, M: int, device: torch.device, diagonal: MarginDiagonal
) -> TargetRows:
    targets.check(N, M, diagonal)
    rows = targets.rows(N, M, device)
    if rows.background is not None:
        raise ValueError("targets: want some candidates that are none, got smoothed targets")
    if rows.columns is not None:
        inside = ((rows.columns >= 0) & (rows.columns < M)).all()
        wanted = "targets: want columns in 0..{last}, or -100 for no target"
        require(inside, wanted, rows.columns, last=M - 1)
    return rows


@dataclass
class MaxMarginProblem(ScoreProblem):
    """Queries against candidates, with the fields of `TargetRows` that say which of these are targets."""

    starts: Tensor | None
    columns: Tensor | None
    weights: Tensor | None
    dense: Tensor | None
    margin: float
    without_diagonal: bool

    # 8 MiB of float32; what is computed from them takes two or three times as much.
    cpu_scores_at_once: ClassVar[int] = 2**21
    weighs_scores: ClassVar[bool] = True

    @cached_property
    def slots(self) -> tuple[Tensor, Tensor]:
        """Each row's target columns in K slots, (N, K) int64, and which slots are taken, (N, K) bool."""
        N = len(self.queries)
        row, column, _ = TargetRows(self.starts, self.columns, self.weights, self.dense).entries()
        counts = torch.bincount(row, minlength=N)
        place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
        columns = column.new_zeros(N, int(counts.max()))
        columns[row, place] = column
        return columns, torch.arange(columns.shape[1], device=row.device) < counts[:, None]


def _hinges(
    p: MaxMarginProblem, rows: slice, scores: Tensor, wants_derivatives: bool
) -> tuple[Tensor, Tensor | None]:
    """The sum of max(0, margin - S_ip + S_ij) of each row, and how often each score raises or lowers it."""
    columns, taken = (x[rows] for x in p.slots)
    of_targets = scores.gather(1, columns)
    row, place = taken.nonzero(as_tuple=True)
    scores[row, columns[row, place]] = -torch.inf
    if p.without_diagonal and rows.start < scores.shape[1]:
        scores.diagonal(rows.start).fill_(-torch.inf)

    losses = scores.new_zeros(len(scores))
    d_scores = torch.zeros_like(scores) if wants_derivatives else None
    for k in range(columns.shape[1]):
        has_target = taken[:, k : k + 1]
        excess = scores + (p.margin - of_targets[:, k : k + 1])
        if d_scores is not None:
            above = (excess > 0) & has_target
            d_scores += above
            counts = above.sum(1, keepdim=True).to(d_scores.dtype)
            d_scores.scatter_add_(1, columns[:, k : k + 1], -counts)
        losses += excess.clamp_(min=0).sum(1) * has_target[:, 0]
    return losses, d_scores


MAX_MARGIN = ScoreOperator("max_margin", MaxMarginProblem, _hinges)
