"""The walk over the score matrix on a GPU, or on the CPU where Triton interprets.

For a softmax of scores without biases, whose targets can be told one by one, `FusedWalk` never
writes a score; for all else `RowWalk` takes whole rows of them. No step waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.problem import Problem
from fastqt.reference import check_targets
from fastqt.schedule import Gradients, Needs, Rows
from fastqt.triton_fused_walk import FusedWalk
from fastqt.triton_row_walk import RowWalk


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    return _walk(p, 1.0, Needs(False, False, False, False, False))[0]


def forward_with_gradients(p: Problem, reduction: str, needs: Needs) -> tuple[Tensor, Gradients]:
    """The mean or sum of the rows' losses, and its gradients."""
    mean = reduction == "mean"
    rows, gradients = _walk(p, 1 / p.queries.shape[0] if mean else 1.0, needs)
    loss = rows.loss.mean() if mean else rows.loss.sum()
    return loss.float(), gradients


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i. Sums are cheaper taken again than read."""
    return _walk(p, row_weights, needs)[1]


def _walk(p: Problem, weights: float | Tensor, needs: Needs) -> tuple[Rows, Gradients]:
    _check_targets(p)
    kind = RowWalk if needs_whole_rows(p) else FusedWalk
    walk = kind(p, weights, needs)
    walk.run()
    return Rows(walk.logsumexp, walk.mass, walk.loss), walk.gradients()


def needs_whole_rows(p: Problem) -> bool:
    """Whether it is one of those that the fused product does not serve."""
    any_cell_a_target = p.targets.dense is not None or p.targets.background is not None
    return any_cell_a_target or p.link == "sigmoid" or p.bias is not None


def _check_targets(p: Problem) -> None:
    """Refuses what no loss is defined for: in words on a CPU, on a GPU by an assertion on the device."""
    if not p.queries.is_cuda:
        check_targets(p)
        return
    t, M = p.targets, p.candidates.shape[0]
    if t.dense is not None:
        sound = (t.dense >= 0).all()
        if p.diagonal != "keep":
            sound &= (t.dense.diagonal() == 0).all()
        if p.mask is not None:
            sound &= ~((t.dense != 0) & p.mask).any()
    else:
        starts, columns, weights = t.compressed()
        row = torch.arange(starts.numel() - 1, device=starts.device)
        row = row.repeat_interleave(starts.diff(), output_size=columns.numel())
        given = weights != 0
        fault = (columns < 0) | (columns >= M)
        if p.diagonal != "keep":
            fault |= row == columns
        if p.mask is not None:
            fault |= p.mask[row, columns.clamp(0, M - 1)]
        sound = (weights >= 0).all() & ~(given & fault).any()
    torch._assert_async(
        sound, "targets: want weights >= 0 at candidates that are neither masked nor on a replaced diagonal"
    )
