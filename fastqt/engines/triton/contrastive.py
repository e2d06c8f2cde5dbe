"""A softmax or a sigmoid over queries against candidates, on a GPU."""

from __future__ import annotations

from torch import Tensor

from fastqt.devices import on_gpu
from fastqt.engines.reference.contrastive import check_targets
from fastqt.engines.triton import operands as memory
from fastqt.engines.triton import repeated, rows, sigmoid, softmax, walks
from fastqt.engines.triton.copies import Copies
from fastqt.engines.triton.free_memory import asked_again_if_none_is_left
from fastqt.engines.triton.operands import Operands, needs_whole_rows, weighted_sum
from fastqt.problem import Gradients, Needs, Problem, Rows


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


@asked_again_if_none_is_left
def forward(p: Problem) -> Rows:
    """The loss of each row."""
    computed = _computed(p, 1.0, Needs())
    return Rows(computed.loss, (computed.logsumexp, computed.mass))


@asked_again_if_none_is_left
def forward_with_gradients(p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    loss, gradients = repeated.computed(p, row_weight, needs, lambda: _computed(p, row_weight, needs))
    return weighted_sum(loss, row_weight), gradients


@asked_again_if_none_is_left
def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i. Taking the sums once more is cheaper than reading them."""
    return _computed(p, row_weights, needs).gradients()


def _computed(p: Problem, weights: float | Tensor, needs: Needs) -> Operands:
    if not on_gpu(p.queries):  # On a GPU the kernels assert it, so that nothing waits.
        check_targets(p)
    whole_rows = needs_whole_rows(p)
    # The vendor's products make the scores of whole rows.
    copies = Copies.of(p, memory.room_for(p), rounds=not whole_rows)
    operands = Operands(p, weights, needs, copies)
    if whole_rows:
        rows.run(operands)
    elif p.link == "sigmoid":
        walks.run_cells(sigmoid.Sigmoid(operands))
    else:
        walks.run_rows(softmax.Softmax(operands))
    return operands
