"""A softmax or a sigmoid over queries against candidates, chunk by chunk of whole rows of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.engines.chunked.prefixes import PrefixWalk
from fastqt.engines.chunked.walk import Result, Walk
from fastqt.engines.soundness import require_sound_targets
from fastqt.problem import Gradients, Needs, Problem, Rows, check_scale_of_thresholds, loss_dtype
from fastqt.torch_modes import without_autocast


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    _check(p)
    with torch.no_grad(), without_autocast(p.queries):
        result = _walked(p, 1.0, Needs())
    return Rows(result.loss, (result.logsumexp, result.mass))


def forward_with_gradients(p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    _check(p)
    with torch.no_grad(), without_autocast(p.queries):
        result = _walked(p, row_weight, needs)
    return (row_weight * result.loss.sum()).to(loss_dtype(p.queries)), result.gradients


def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, with the scores computed once more."""
    with torch.no_grad(), without_autocast(p.queries):
        return _walked(p, row_weights, needs).gradients


def _walked(p: Problem, weights: float | Tensor, needs: Needs) -> Result:
    """What a walk over the scores finds, with the arguments of `Walk`."""
    return (PrefixWalk if p.prefix_dims else Walk)(p, weights, needs).run()


def backward_of_columns(
    p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs
) -> Gradients:
    """The part of the gradients of longer rows that some of their columns have."""
    with torch.no_grad(), without_autocast(p.queries):
        return Walk(p, row_weights, needs, (logsumexp, mass)).run().gradients


def _check(p: Problem) -> None:
    check_scale_of_thresholds(p)
    require_sound_targets(p)
