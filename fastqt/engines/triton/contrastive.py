"""A softmax or a sigmoid over queries against candidates, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import on_gpu
from fastqt.engines.reference.contrastive import check_targets
from fastqt.engines.triton import operands as memory
from fastqt.engines.triton import repeated, rows, sigmoid, softmax, walks
from fastqt.engines.triton.copies import Copies
from fastqt.engines.triton.free_memory import asked_again_if_none_is_left
from fastqt.engines.triton.operands import Operands, needs_whole_rows, weighted_sum
from fastqt.problem import Gradients, Needs, Problem, Rows

KEPT_BYTES = 128 * 2**20  # of exponentials, up to which they are kept from the forward to the backward pass


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


@asked_again_if_none_is_left
def forward(p: Problem) -> Rows:
    """The loss of each row."""
    computed = _computed(p, 1.0, Needs())
    return Rows(computed.loss, (computed.logsumexp, computed.mass))


@asked_again_if_none_is_left
def forward_for_backward(p: Problem) -> Rows:
    """The same; where the exponentials are few, they and their sums by tiles are saved as well."""
    if not _keeps(p):
        return forward(p)
    link = softmax.Softmax(_operands(p, 1.0, Needs()))
    kept, o = link.whole_matrix(), link.operands
    return Rows(o.loss, (o.logsumexp, o.mass, *kept))


@asked_again_if_none_is_left
def forward_with_gradients(p: Problem, row_weight: float, needs: Needs) -> tuple[Tensor, Gradients]:
    """row_weight * sum_i loss_i, and its gradients."""
    loss, gradients = repeated.computed(p, row_weight, needs, lambda: _computed(p, row_weight, needs))
    return weighted_sum(loss, row_weight), gradients


@asked_again_if_none_is_left
def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i, from exponentials that were kept or are computed again.

    Where they are computed again, so are their sums: it is cheaper than reading them.
    """
    _, _, *kept = saved
    return _computed(p, row_weights, needs, softmax.Kept(*kept) if kept else None).gradients()


def _keeps(p: Problem) -> bool:
    """Whether exponentials are kept for the backward pass, which then takes two products and not three.

    Those of float16 hold the row's weight and logsumexp, and those of sigmoids the weight, which the forward
    pass does not know.
    """
    if needs_whole_rows(p) or p.link == "sigmoid" or p.queries.dtype is torch.float16:
        return False
    width = len(p.candidates) + (0 if p.negatives is None else len(p.negatives))
    size = len(p.queries) * memory.aligned(width) * p.queries.element_size()
    return p.memory == "fast" and size <= KEPT_BYTES


def _operands(p: Problem, weights: float | Tensor, needs: Needs) -> Operands:
    if not on_gpu(p.queries):  # On a GPU the kernels assert it, so that nothing waits.
        check_targets(p)
    # The vendor's products make the scores of whole rows.
    copies = Copies.of(p, memory.room_for(p), rounds=not needs_whole_rows(p))
    return Operands(p, weights, needs, copies)


def _computed(
    p: Problem, weights: float | Tensor, needs: Needs, kept: softmax.Kept | None = None
) -> Operands:
    operands = _operands(p, weights, needs)
    if needs_whole_rows(p):
        rows.run(operands)
    elif p.link == "sigmoid":
        walks.run_cells(sigmoid.Sigmoid(operands))
    else:
        walks.run_rows(softmax.Softmax(operands, kept=kept))
    return operands
