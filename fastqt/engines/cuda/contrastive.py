"""A small problem on a GPU: scores, loss and gradients in one launch of csrc/cuda."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.problem import (
    DIAGONALS,
    Gradients,
    Inputs,
    Needs,
    Problem,
    Rows,
    finite_scale,
)
from fastqt.torch_modes import tf32_allowed


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    return _launch(p, 1.0, None, Inputs())


def forward_with_gradients(p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    total, gradients = p.queries.new_empty((), dtype=torch.float32), _empty_gradients(p, needs)
    _launch(p, row_weight, total, gradients)
    return total, gradients


def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, all computed anew, which is cheaper than reading."""
    gradients = _empty_gradients(p, needs)
    _launch(p, row_weights, None, gradients)
    return gradients


def _launch(p: Problem, weights: float | Tensor, total: Tensor | None, g: Gradients) -> Rows:
    logsumexp, mass, loss = (p.queries.new_empty(p.queries.shape[0], dtype=torch.float64) for _ in range(3))
    scale = p.scale if isinstance(p.scale, Tensor) and p.scale.device == p.queries.device else None
    per_row = weights if isinstance(weights, Tensor) else None

    torch.ops.fastqt.small_contrastive_.default(
        p.queries.contiguous(),
        p.candidates.contiguous(),
        None if p.row_negatives is None else p.row_negatives.contiguous(),
        None if p.partners is None else p.partners.contiguous(),
        p.mix,
        # The kernel reads a scale on the device by itself, so that nothing waits for its value.
        None if scale is None else scale.detach().float(),
        0.0 if scale is not None else finite_scale(p.scale),
        DIAGONALS.index(p.diagonal),
        *(x.contiguous() for x in p.targets.compressed()),
        None if per_row is None else per_row.contiguous(),
        0.0 if isinstance(weights, Tensor) else weights,
        p.queries.dtype is torch.float32 and tf32_allowed(),
        logsumexp,
        mass,
        loss,
        total,
        g.queries,
        g.candidates,
        g.row_negatives,
        g.scale,
    )
    return Rows(loss, (logsumexp, mass))


def _empty_gradients(p: Problem, needs: Needs) -> Gradients:
    def like(x: Tensor | None, wanted: bool | None) -> Tensor | None:
        return x.new_empty(x.shape) if wanted and x is not None else None

    return Inputs(
        queries=like(p.queries, needs.queries),
        candidates=like(p.candidates, needs.candidates),
        row_negatives=like(p.row_negatives, needs.row_negatives),
        scale=p.queries.new_empty((), dtype=torch.float64) if needs.scale else None,
    )
