"""Matryoshka losses on a CPU: the losses of several prefixes of the embeddings in the products of one.

The walk is C++, in csrc/cpu/prefixes.cpp: chunks of whole rows, of which there is a tile for each prefix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines.cpu import contrastive
from fastqt.problem import Gradients, Inputs, Needs, Problem, Rows, loss_dtype, room_of
from fastqt.steps import even_step


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    weights = torch.ones(len(p.queries), dtype=torch.float64, device=p.queries.device)
    loss, _ = _computed(p, weights, Inputs())
    return Rows(loss, (torch.zeros_like(loss), torch.zeros_like(loss)))


def forward_with_gradients(p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    weights = torch.full((len(p.queries),), row_weight, dtype=torch.float64, device=p.queries.device)
    loss, gradients = _computed(p, weights, needs)
    return (row_weight * loss.sum()).to(loss_dtype(p.queries)), gradients


def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
    return _computed(p, row_weights, needs)[1]


def _computed(p: Problem, row_weights: Tensor, needs: Needs) -> tuple[Tensor, Gradients]:
    """The loss of each row, (N,) float64, and the gradients of their weighted sum."""
    loss: Tensor
    loss, gradients, status, row, column = torch.ops.fastqt.prefix_loss.default(
        *contrastive.problem_arguments(p),
        list(p.prefix_dims),
        list(p.prefix_weights),
        _chunk_rows(p),
        row_weights,
        [*map(bool, needs)],
    )
    contrastive.check_targets(p, status, row, column)
    return loss, contrastive.gradients_of(gradients, needs)


def _chunk_rows(p: Problem) -> int:
    """How many rows a chunk has, of which each takes a row of scores for each prefix."""
    room = min(room_of(p.memory, contrastive.CHUNK_BYTES, contrastive.LOW_BYTES), contrastive.CHUNK_BYTES)
    rows = room // (contrastive.width_of(p) * len(p.prefix_dims) * p.queries.element_size())
    return even_step(len(p.queries), max(rows, contrastive.MIN_CHUNK_ROWS))
