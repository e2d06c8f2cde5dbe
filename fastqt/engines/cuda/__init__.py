"""The engine "cuda" for small problems on a GPU: scores, loss and gradients in one launch of csrc/cuda.

A batch of a few hundred sentences is microseconds of arithmetic, which separate launches would outlast.
No step waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

from fastqt.devices import known_properties, why_too_old
from fastqt.engines import ops
from fastqt.engines.cuda import clip, contrastive
from fastqt.engines.engine import Engine
from fastqt.engines.features import MIXED
from fastqt.problem import AnyProblem, ClipProblem, Problem

# The limits of csrc/cuda/small_problem.h, and the shared memory that a block takes.
MOST_ROWS, MOST_WIDTH = 1024, 4800
SHARED_BYTES = {torch.float32: 147_904, torch.bfloat16: 162_256, torch.float16: 162_256}
_MODULES: dict[type[AnyProblem], Any] = {Problem: contrastive, ClipProblem: clip}


def why_not_here(p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why this build, a GPU or the sizes of a problem rule the kernel out; None if they do not."""
    return ops.cuda_error or why_not_on(device, dtype) or (None if p is None else why_too_large(p))


def why_not_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a GPU cannot run the kernel; None if it can."""
    if (reason := why_too_old(device)) is not None:
        return reason
    properties = known_properties(device)
    shared: int = getattr(properties, "shared_memory_per_block_optin", 0)  # torch's stubs do not know it
    needed = SHARED_BYTES[dtype]
    if shared < needed:
        return f"a block takes {needed} bytes of shared memory, {properties.name} has {shared}"
    return None


def why_too_large(p: AnyProblem) -> str | None:
    """Why the kernel does not take a problem of these sizes; None if it does."""
    (N, D), M = p.queries.shape, p.candidates.shape[0]
    if N > MOST_ROWS or M > MOST_ROWS or D > MOST_WIDTH:
        return f"it takes N, M <= {MOST_ROWS} and D <= {MOST_WIDTH}, got N={N}, M={M}, D={D}"
    return None


ENGINE = Engine(
    "cuda",
    takes=frozenset({"row_negatives", MIXED}),
    of_kind=lambda p: _MODULES.get(type(p)),
    dtype_for=lambda p, dtype: dtype,
    normalizes=lambda p, dtype: False,
    devices=("cuda",),
    dtypes=tuple(SHARED_BYTES),
    why_not_here=why_not_here,
)
