"""The engine "cpu": losses and their gradients in C++, tile by tile of the score matrix."""

from __future__ import annotations

from typing import Any

import torch

from fastqt.devices import asked_once
from fastqt.engines import ops, own_products
from fastqt.engines.cpu import clip, contrastive, prefixes, three_block
from fastqt.engines.engine import Engine
from fastqt.engines.features import FEATURES, LEAVING, MATRYOSHKA_BESIDE_ROW_NEGATIVES, MIXED
from fastqt.problem import AnyProblem, ClipProblem, Problem, ThreeBlockProblem
from fastqt.torch_modes import is_traced

CELLS_PER_TARGET = 8  # at least, in a problem of bfloat16
# The instructions for products of bfloat16 matrices, by tiles and by vectors. Without them torch makes these
# from products of float32, and is slower than with float32 itself.
TILES, VECTORS = "amx_bf16", "avx512_bf16"

_MODULES: dict[type[AnyProblem], Any] = {
    Problem: contrastive,
    ClipProblem: clip,
    ThreeBlockProblem: three_block,
}


def _of_kind(p: Any) -> Any:
    module = _MODULES[type(p)]
    return prefixes if module is contrastive and p.prefix_dims else module


def dtype_for(p: AnyProblem, dtype: torch.dtype) -> torch.dtype:
    """What inputs of a dtype are computed in.

    bfloat16 stays where the CPU multiplies matrices of it faster than of float32, unless so many cells are
    targets that their scores, each of which is a product of its own, would cost more than that saves.
    float16 is computed in float32.
    """
    if dtype is torch.bfloat16 and has_bfloat16_products() and _scores_few_targets(p):
        return dtype
    return torch.promote_types(dtype, torch.float32)


def has_bfloat16_products() -> bool:
    """Whether bfloat16 matrices are multiplied faster than those of float32, as oneDNN does where it can."""
    return bool(torch.backends.mkldnn.enabled) and _has_bfloat16_instructions()


@asked_once
def _has_bfloat16_instructions() -> bool:
    capabilities = torch.cpu.get_capabilities()
    has_vectors = bool(capabilities.get(VECTORS)) and not own_products.has_slow_bfloat16_vectors()
    return torch.backends.mkldnn.is_available() and (bool(capabilities.get(TILES)) or has_vectors)


def _scores_few_targets(p: AnyProblem) -> bool:
    if not isinstance(p, Problem):
        return isinstance(p, ClipProblem)
    if p.prefix_dims:  # whose gradients are added up before they are multiplied
        return False
    columns = p.targets.columns
    if columns is None or is_traced(p.queries):  # One graph serves all sizes, where few are so small.
        return columns is not None
    cells = p.queries.shape[0] * p.candidates.shape[0]
    return CELLS_PER_TARGET * columns.shape[0] <= cells


ENGINE = Engine(
    "cpu",
    takes=FEATURES - {MATRYOSHKA_BESIDE_ROW_NEGATIVES, MIXED, LEAVING},
    of_kind=_of_kind,
    dtype_for=dtype_for,
    normalizes=lambda p, dtype: not isinstance(p, ThreeBlockProblem),
    devices=("cpu",),
    why_not_here=lambda p, device, dtype: ops.native_error,
    by_kind=(torch.float32, torch.float64, torch.float16),
)
