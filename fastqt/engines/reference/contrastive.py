"""The contrastive loss in plain PyTorch: what every other engine is measured against.

It forms the score matrix and lets autograd differentiate it, so it is differentiable any
number of times and runs on any device, in O(N * M) memory.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fastqt.checks import require
from fastqt.matryoshka import sum_of_prefixes
from fastqt.problem import (
    TARGET_MASKED,
    TARGET_NOT_FINITE,
    TARGET_NOT_POSITIVE,
    TARGET_ON_DIAGONAL,
    TARGET_OUTSIDE,
    Problem,
    check_finite_scale,
    check_scale_of_thresholds,
    prefix_of,
    reduce,
    target_error,
    unit_rows,
    with_embeddings,
)
from fastqt.torch_modes import is_traced

TARGETS_WANTED = "targets: want weights >= 0 at candidates that are neither masked nor on a replaced diagonal"


def contrastive_loss(p: Problem, reduction: str) -> Tensor:
    """The reduced loss of a checked problem."""
    check_finite_scale(p.scale)
    check_scale_of_thresholds(p)
    check_targets(p)
    return reduce(row_losses(p), reduction)


def _losses_of_one(p: Problem) -> Tensor:
    """The loss of each row of embeddings as they are, (N,)."""
    T = p.targets.to_dense(p.queries.shape[0], p.candidates.shape[0]).to(p.queries.dtype)
    similar = p.queries @ p.candidates.T
    scores = p.scale * similar
    if p.bias is not None:
        scores = scores + p.bias

    scores = without_false_negatives(p, scores, similar, T)
    scores = replace_diagonal(scores, p.diagonal)
    scores = scores.masked_fill(excluded_cells(p, T), float("-inf"))

    blocks = [scores]
    if p.negatives is not None:
        similar = p.queries @ p.negatives.T
        blocks.append(without_false_negatives(p, p.scale * similar, similar))
    if p.row_negatives is not None:
        similar = (p.queries * p.row_negatives).sum(1, keepdim=True)
        blocks.append(without_false_negatives(p, p.scale * similar, similar))
    if p.row_scores is not None:
        absent = p.row_scores.isneginf()
        blocks.append(p.row_scores.masked_fill(absent, float("-inf"))[:, None])  # without a gradient
    if p.link == "log_sum_exp":
        return log_sum_exp(torch.cat(blocks, 1))
    return cross_entropy(blocks, T) if p.link == "sigmoid" else divergence(blocks, T)


def log_sum_exp(scores: Tensor) -> Tensor:
    """That of each row, (N,): -inf, with derivatives of 0, for a row that has been excluded as a whole.

    torch has a derivative of NaN there, which ends its anomaly mode, and no second one.
    """
    empty = scores.detach().isneginf().all(1)
    return scores.masked_fill(empty[:, None], 0).logsumexp(1).masked_fill(empty, float("-inf"))


def divergence(blocks: list[Tensor], T: Tensor) -> Tensor:
    """sum_j T_ij (log T_ij - log P_ij) for P the softmax of all blocks' scores, T (N, M) of the first's."""
    # A row without targets adds nothing, even if all its candidates are excluded.
    empty = (T == 0).all(1, keepdim=True)
    logsumexp = torch.cat([block.masked_fill(empty, 0) for block in blocks], 1).logsumexp(1, keepdim=True)
    is_target = T > 0
    entropy = torch.where(is_target, T.log(), 0)
    cells = T * (entropy + logsumexp - blocks[0].masked_fill(~is_target, 0))
    return cells.masked_fill(~is_target, 0).sum(1)


def cross_entropy(blocks: list[Tensor], T: Tensor) -> Tensor:
    """sum_j -T_ij log P_ij - (1 - T_ij) log (1 - P_ij) for P the sigmoid of each score."""
    first, *others = (-F.logsigmoid(-block) for block in blocks)
    is_target = T != 0
    # From log P a coefficient is 1 - P without a difference, in which a P close to 1 would be lost.
    targets = (1 - T) * first - T * F.logsigmoid(blocks[0].masked_fill(~is_target, 0))
    return torch.cat([torch.where(is_target, targets, first), *others], 1).sum(1)


def replace_diagonal(scores: Tensor, diagonal: str) -> Tensor:
    """Scores (N, M) with the cells (i, i) replaced as `diagonal` says."""
    if diagonal == "keep":
        return scores
    own = torch.ones_like(scores, dtype=torch.bool).triu().tril()
    return scores.masked_fill(own, 0.0 if diagonal == "zero" else float("-inf"))


def excluded_cells(p: Problem, T: Tensor) -> Tensor:
    """Which cells (N, M) leave the loss by `mask` or by equal groups."""
    excluded = torch.zeros_like(T, dtype=torch.bool)
    if p.mask is not None:
        excluded = excluded | p.mask
    if p.query_groups is not None and p.candidate_groups is not None:
        excluded = excluded | ((p.query_groups[:, None] == p.candidate_groups) & (T == 0))
    return excluded


def row_losses(p: Problem) -> Tensor:
    """The loss of each row, (N,)."""
    if isinstance(p.scale, Tensor):  # Blocks and prefixes add to its gradient before that is rounded.
        p = replace(p, scale=p.scale.to(p.queries.dtype))
    if not p.prefix_dims:
        return _losses_of_one(p)
    return sum_of_prefixes(p.prefix_dims, p.prefix_weights, lambda dim: _losses_of_one(_prefix(p, dim)))


def _prefix(p: Problem, dim: int) -> Problem:
    """The problem of the first `dim` columns, whose rows have norm 1 where that is asked for."""
    prefix = prefix_of(p, dim)
    return replace(with_embeddings(prefix, unit_rows), normalize=False) if p.normalize else prefix


def without_false_negatives(p: Problem, scores: Tensor, similar: Tensor, T: Tensor | None = None) -> Tensor:
    """Scores of which those leave whose similarities are above the threshold of their row, unless targets."""
    if p.thresholds is None:
        return scores
    above = similar.detach() > p.thresholds[:, None]
    return scores.masked_fill(above if T is None else above & (T == 0), float("-inf"))


def check_targets(p: Problem) -> None:
    """Raises ValueError for a target that no loss is defined for, which a compiled graph asserts."""
    traced = is_traced(p.queries)
    # The number of those that are not 0 depends on values, and a graph has no room for as many.
    row, column, weight = p.targets.all_entries() if traced else p.targets.entries()

    outside = (column < 0) | (column >= p.candidates.shape[0])
    sums = weight.new_zeros(p.queries.shape[0]).index_add(0, row, weight)
    faults = {
        TARGET_NOT_POSITIVE: ~(weight > 0),
        TARGET_NOT_FINITE: weight.isinf() | sums[row].isinf() & (p.link == "softmax"),
        TARGET_OUTSIDE: outside,
        TARGET_ON_DIAGONAL: (row == column) & (p.diagonal != "keep"),
        TARGET_MASKED: torch.zeros_like(outside)
        if p.mask is None
        else p.mask[row, column.where(~outside, 0)],
    }
    if traced:
        anywhere = torch.stack([*faults.values()]).any(0) & (weight != 0)
        require(~anywhere.any(), TARGETS_WANTED)
        return

    for status, fault in faults.items():
        if fault.any():
            first = int(fault.nonzero()[0])
            raise target_error(status, int(row[first]), int(column[first]), p)
