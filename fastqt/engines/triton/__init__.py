"""The Triton engine: a loss on a GPU, or on a CPU where Triton interprets. No step waits for the device.

`loop` walks over the score matrix and asks a link what becomes of its scores: `softmax` and `sigmoid` take
targets that can be listed and never write a score, `clip` is CLIP's softmax of rows and columns. Problems in
which every cell may be a target take whole rows of scores, in `rows`. `three_block` is MixCSE's.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import TRITON_COMPILES_FOR, is_described, on_gpu
from fastqt.engines.reference import check_targets
from fastqt.engines.triton import operands as memory
from fastqt.engines.triton.free_memory import asked_again_if_none_is_left
from fastqt.engines.triton.operands import Operands, weighted_sum
from fastqt.problem import (
    AnyProblem,
    ClipProblem,
    Gradients,
    Needs,
    Problem,
    Rows,
    ThreeBlockProblem,
    room_of,
)

# Importing Triton takes a second, so the modules with kernels are imported when they are first used.
INSTALLED = find_spec("triton") is not None


def why_not(p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this engine cannot compute a problem; None if it can."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1" and not is_described():
        return f"the tensors are on {device}, where Triton only runs with TRITON_INTERPRET=1"
    if device.type not in ("cpu", *TRITON_COMPILES_FOR):
        return f"the tensors are on {device}, for which its kernels have never been compiled"
    if isinstance(p, Problem) and p.thresholds is not None:
        return "it does not know thresholds of similarities"
    return "it has no float64" if dtype is torch.float64 else None


def of_kind(p: AnyProblem) -> Any:
    """The module that computes problems of this kind.

    None for MixCSE's three blocks, unless with memory="fast", where only a few rows of them would fit beside
    the sums: three losses of one block each are faster then.
    """
    if isinstance(p, ClipProblem):
        from fastqt.engines.triton import clip

        return clip
    if not isinstance(p, ThreeBlockProblem):
        return sys.modules[__name__]

    if p.memory != "fast":
        N, D = p.queries.shape
        room = room_of(p.memory, memory.FAST_BYTES, memory.LOW_BYTES)
        if room < 4 * N * D + 12 * N * memory.ROW_MULTIPLE:
            return None

    from fastqt.engines.triton import three_block

    return three_block


def scaled(gradients: list[Tensor], upstream: Tensor, multiplier: float) -> list[Tensor]:
    """Multiplies gradients by upstream * multiplier, in place; returns those that are left for torch."""
    from fastqt.kernels.upstream import scalable, scale_gradients

    taken: list[Tensor] = []
    left: list[Tensor] = []
    for g in gradients:
        (taken if scalable(g, upstream) else left).append(g)
    scale_gradients(taken, upstream, multiplier)
    return left


def dtype_for(p: AnyProblem, dtype: torch.dtype) -> torch.dtype:
    """What inputs of a dtype are computed in: themselves, as `why_not` refuses float64."""
    return dtype


def normalizes(p: AnyProblem, dtype: torch.dtype) -> bool:
    """Whether it takes embeddings as they are where their rows are to be normalised.

    It stores probabilities times inverse norms, which float16 has too little range for. A problem of whole
    rows of scores has larger matrices than the copies.
    """
    if isinstance(p, ThreeBlockProblem) or dtype is torch.float16:
        return False
    return isinstance(p, ClipProblem) or not needs_whole_rows(p)


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
    from fastqt.engines.triton import repeated

    loss, gradients = repeated.computed(p, row_weight, needs, lambda: _computed(p, row_weight, needs))
    return weighted_sum(loss, row_weight), gradients


@asked_again_if_none_is_left
def backward(p: Problem, saved: tuple[Tensor, ...], row_weights: Tensor, needs: Needs) -> Gradients:
    """The gradients of sum_i row_weights_i loss_i. Taking the sums once more is cheaper than reading them."""
    return _computed(p, row_weights, needs).gradients()


def _computed(p: Problem, weights: float | Tensor, needs: Needs) -> Operands:
    from fastqt.engines.triton import rows, sigmoid, softmax, walks
    from fastqt.engines.triton.copies import Copies

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


def needs_whole_rows(p: Problem) -> bool:
    """Whether any cell may be a target, so that they cannot be listed."""
    return p.targets.dense is not None or p.targets.background is not None
