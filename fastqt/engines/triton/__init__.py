"""The Triton engine: a loss on a GPU, or on a CPU where Triton interprets. No step waits for the device.

`loop` walks over the score matrix and asks a link what becomes of its scores: `softmax` and `sigmoid` take
targets that can be listed and never write a score, `clip` is CLIP's softmax of rows and columns. Problems in
which every cell may be a target take whole rows of scores, in `rows`. `three_block` is MixCSE's.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fastqt.devices import TRITON_COMPILES_FOR, is_described, why_too_old
from fastqt.engines.engine import Engine
from fastqt.engines.features import COLUMNS, FEATURES, MATRYOSHKA, MATRYOSHKA_BESIDE_ROW_NEGATIVES
from fastqt.engines.triton import operands as memory
from fastqt.problem import AnyProblem, ClipProblem, Problem, ThreeBlockProblem, room_of

# Importing Triton takes a second, so the modules with kernels are imported when they are first used.
INSTALLED = find_spec("triton") is not None


def _why_not_here(p: AnyProblem | None, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton does not run on a device; None if it does."""
    if not INSTALLED:
        return "triton is not installed"
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1" and not is_described():
        return f"the tensors are on {device}, where Triton only runs with TRITON_INTERPRET=1"
    if device.type not in ("cpu", *TRITON_COMPILES_FOR):
        return f"the tensors are on {device}, for which its kernels have never been compiled"
    if isinstance(p, Problem) and p.thresholds is not None:
        if memory.needs_whole_rows(p):
            return "it does not know thresholds where any candidate may be a target"
        if p.normalize and dtype is torch.float16:
            return "it would compare thresholds with cosines of rows that are rounded to float16"
    return why_too_old(device)  # Triton makes no matrix instructions there, and spills registers.


def _of_kind(p: AnyProblem) -> Any:
    """The module that computes problems of this kind.

    None for MixCSE's three blocks, unless with memory="fast", where only a few rows of them would fit beside
    the sums: three losses of one block each are faster then.
    """
    if isinstance(p, ClipProblem):
        from fastqt.engines.triton import clip

        return clip
    if not isinstance(p, ThreeBlockProblem):
        from fastqt.engines.triton import contrastive

        return contrastive

    if p.memory != "fast":
        N, D = p.queries.shape
        room = room_of(p.memory, memory.FAST_BYTES, memory.LOW_BYTES)
        if room < 4 * N * D + 12 * N * memory.ROW_MULTIPLE:
            return None

    from fastqt.engines.triton import three_block

    return three_block


def _scaled(gradients: list[Tensor], upstream: Tensor, multiplier: float) -> list[Tensor]:
    """Multiplies gradients by upstream * multiplier, in place; returns those that are left for torch."""
    from fastqt.kernels.upstream import scalable, scale_gradients

    taken: list[Tensor] = []
    left: list[Tensor] = []
    for g in gradients:
        (taken if scalable(g, upstream) else left).append(g)
    scale_gradients(taken, upstream, multiplier)
    return left


def _normalizes(p: AnyProblem, dtype: torch.dtype) -> bool:
    """Whether it takes embeddings as they are where their rows are to be normalised.

    It stores probabilities times inverse norms, which float16 has too little range for. A problem of whole
    rows of scores has larger matrices than the copies.
    """
    if isinstance(p, ThreeBlockProblem) or dtype is torch.float16:
        return False
    return isinstance(p, ClipProblem) or not memory.needs_whole_rows(p)


ENGINE = Engine(
    "triton",
    takes=FEATURES - {MATRYOSHKA, MATRYOSHKA_BESIDE_ROW_NEGATIVES, COLUMNS},
    of_kind=_of_kind,
    dtype_for=lambda p, dtype: dtype,
    normalizes=_normalizes,
    dtypes=(torch.float32, torch.bfloat16, torch.float16),
    why_not_here=_why_not_here,
    scales=_scaled,
)
