"""The walk over the score matrix on a GPU, or on the CPU where Triton interprets.

Where targets can be told one by one, `FusedWalk` for a softmax and `SigmoidWalk` for a sigmoid never
write a score; for all else `RowWalk` takes whole rows of them. No step waits for the device.
"""

from __future__ import annotations

from torch import Tensor

from fastqt.engines.reference import check_targets
from fastqt.engines.triton.rows import RowWalk
from fastqt.engines.triton.sigmoid import SigmoidWalk
from fastqt.engines.triton.softmax import FusedWalk
from fastqt.problem import Gradients, Needs, Problem, Rows, static_grad_scale


def forward(p: Problem) -> Rows:
    """The loss of each row."""
    return _walk(p, 1.0, Needs(False, False, False, False, False))[0]


def forward_with_gradients(p: Problem, reduction: str, needs: Needs) -> tuple[Tensor, Gradients]:
    """The mean or sum of the rows' losses, and its gradients times `static_grad_scale`."""
    mean = reduction == "mean"
    weight = 1 / p.queries.shape[0] if mean else 1.0
    rows, gradients = _walk(p, static_grad_scale(p.queries.dtype, reduction) * weight, needs)
    loss = rows.loss.mean() if mean else rows.loss.sum()
    return loss.float(), gradients


def backward(p: Problem, logsumexp: Tensor, mass: Tensor, row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i. Sums are cheaper taken again than read."""
    return _walk(p, row_weights, needs)[1]


def _walk(p: Problem, weights: float | Tensor, needs: Needs) -> tuple[Rows, Gradients]:
    if not p.queries.is_cuda:
        check_targets(p)
    fused = SigmoidWalk if p.link == "sigmoid" else FusedWalk
    kind = RowWalk if needs_whole_rows(p) else fused
    walk = kind(p, weights, needs)
    walk.run()
    return Rows(walk.logsumexp, walk.mass, walk.loss), walk.gradients()


def needs_whole_rows(p: Problem) -> bool:
    """Whether it is one of those that the fused product does not serve."""
    return p.targets.dense is not None or p.targets.background is not None
