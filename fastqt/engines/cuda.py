"""The engine for small problems on a GPU: scores, loss and gradients in one launch of csrc/cuda.

A batch of a few hundred sentences is microseconds of arithmetic, which separate launches would outlast.
No step waits for the device.
"""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from fastqt.engines import ops
from fastqt.problem import (
    DIAGONALS,
    AnyProblem,
    ClipProblem,
    Gradients,
    Inputs,
    Needs,
    Problem,
    Rows,
    finite_scale,
)
from fastqt.torch_modes import tf32_allowed

# The limits of csrc/cuda/small_problem.h, and the shared memory that a block takes.
MOST_ROWS, MOST_WIDTH = 1024, 4800
SHARED_BYTES = {torch.float32: 147_904, torch.bfloat16: 162_256, torch.float16: 162_256}
CAPABILITY = (8, 0)

# The optional tensors of a problem that the kernel does not take; groups are given both or not at all.
_TAKEN = ("row_negatives", "partners", "candidate_groups")
UNKNOWN = sorted(x.name for x in fields(Problem) if x.type == "Tensor | None" and x.name not in _TAKEN)


def why_not(p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this engine cannot compute a problem; None if it can."""
    if ops.cuda_error is not None or device.type != "cuda":
        return ops.cuda_error or f"the tensors are on {device}"
    if dtype is torch.float64:
        return "it has no float64"
    return _why_not_on(device, dtype) or (None if p is None else _why_not_this(p))


def dtype_for(p: AnyProblem, dtype: torch.dtype) -> torch.dtype:
    """What inputs of a dtype are computed in: themselves, as `why_not` refuses float64."""
    return dtype


def normalizes(p: AnyProblem, dtype: torch.dtype) -> bool:
    """Whether it takes embeddings as they are where their rows are to be normalised: no."""
    return False


def gradients_in_forward(p: Problem) -> bool:
    """Whether a scalar loss takes its gradients in the forward pass."""
    return True


def _why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a GPU cannot run the kernel; None if it can."""
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) < CAPABILITY:
        return f"{properties.name} has compute capability {properties.major}.{properties.minor}, want 8.0"
    shared: int = getattr(properties, "shared_memory_per_block_optin", 0)  # torch's stubs do not know it
    needed = SHARED_BYTES[dtype]
    if shared < needed:
        return f"a block takes {needed} bytes of shared memory, {properties.name} has {shared}"
    return None


def _why_not_this(p: AnyProblem) -> str | None:
    """Why the kernel does not take a problem; None if it does."""
    (N, D), M = p.queries.shape, p.candidates.shape[0]
    if N > MOST_ROWS or M > MOST_ROWS or D > MOST_WIDTH:
        return f"it takes N, M <= {MOST_ROWS} and D <= {MOST_WIDTH}, got N={N}, M={M}, D={D}"
    if isinstance(p, ClipProblem) and p.pairs is not None:
        return "it does not take a rectangle of the scores that several processes share"
    if not isinstance(p, Problem):
        return None
    unknown = {
        "sigmoid_loss": p.link == "sigmoid",
        "log_sum_exp": p.link == "log_sum_exp",
        "dense targets": p.targets.dense is not None,
        "smoothed targets": p.targets.background is not None,
        **{name: getattr(p, name) is not None for name in UNKNOWN},
    }
    refused = [name for name, given in unknown.items() if given]
    return f"it does not know {', '.join(refused)}" if refused else None


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
