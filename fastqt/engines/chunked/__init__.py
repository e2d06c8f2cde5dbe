"""The engine "torch": a loss and its gradients in torch's own operations, on any device and in any dtype.

It is for whatever the kernels do not take: other devices, float64 on a GPU, an installation without the
compiled extension. `walk` explains how it computes, `prefixes` is that of several prefixes of the embeddings,
and `clip` is CLIP's softmax of rows and columns. Nothing
here waits for a device. MixCSE's three blocks are composed of losses of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import product_dtype
from fastqt.engines.chunked.prefixes import PrefixWalk
from fastqt.engines.chunked.walk import Result, Walk
from fastqt.engines.soundness import require_sound_targets
from fastqt.problem import (
    AnyProblem,
    Gradients,
    Needs,
    Problem,
    Rows,
    check_scale_of_thresholds,
    loss_dtype,
)
from fastqt.torch_modes import without_autocast


def why_not(p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this engine cannot compute a problem: it always can."""
    return None


def dtype_for(p: AnyProblem, dtype: torch.dtype) -> torch.dtype:
    """What inputs of a dtype are computed in: those of 16 bits in float32, unless the device does better.

    The walk over several prefixes has scores that are sums of products, in float32.
    """
    if isinstance(p, Problem) and p.prefix_dims:
        return torch.promote_types(dtype, torch.float32)
    return product_dtype(p.queries.device, dtype)


def normalizes(p: AnyProblem, dtype: torch.dtype) -> bool:
    """Whether it takes embeddings as they are where their rows are to be normalised.

    It rounds probabilities times inverse norms, which float16 has too little range for.
    """
    return dtype is not torch.float16


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
