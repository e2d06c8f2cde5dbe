"""What all launch functions share: whether Triton interprets, the device, the arithmetic, the tiles."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from fastqt.devices import AMD, on_gpu, properties
from fastqt.torch_modes import tf32_allowed

# Triton decides when kernels are decorated, so this is decided when the module is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

ROWS_AT_ONCE = 8  # rows of a program that adds up the sums of tiles
TILES_AT_ONCE = 64  # of a row, whose sums it adds up; not as many as there are, which would be compiled for
WARP = 64 if AMD else 32  # threads; the most that any of a vendor's GPUs has

_COMPUTE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_HERE = contextlib.nullcontext()


@dataclass(frozen=True)
class Config:
    """How a matrix product is cut into tiles."""

    rows: int = 128  # of a tile of the result, as `columns`
    columns: int = 128
    width: int = 64  # the size of a step along the inner dimension
    group: int = 8  # how many blocks of rows are walked together, so that the L2 cache serves what they share
    warps: int = 8  # of a program
    stages: int = 3  # how many steps' operands are loaded ahead of the tensor cores
    descriptors: bool = False  # whether Hopper's copy engine (TMA) loads the operands that allow it


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of a product's operands. The interpreter computes in numpy, which has no bfloat16."""
    if INTERPRETED:
        return tl.float32
    return _COMPUTE[dtype]


def precision(dtype: torch.dtype) -> str:
    """The precision of products of elements of `dtype`: torch's setting counts for float32 alone.

    Of AMD's GPUs only one generation has TF32, and Triton refuses it for others.
    """
    return "tf32" if dtype is torch.float32 and not AMD and tf32_allowed() else "ieee"


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes the device of `x` the current one, which launches go to."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(x.device)


def multiprocessors(x: Tensor) -> int:
    """How many the device of `x` has. The interpreter gets few, so that each program has several tiles."""
    return int(properties(x.device).multi_processor_count) if on_gpu(x) else 4


def cdiv(n: int, step: int) -> int:
    """How many steps cover n. Triton's own function of this name costs a launch more than a microsecond."""
    return -(-n // step)


def block(n: int, most: int) -> int:
    """The least power of two that covers n elements, or `most` if that is less."""
    return min(1 << max(n - 1, 0).bit_length(), most)


def elements_of_program(n: int, most: int, warps: int) -> dict[str, int]:
    """BLOCK and num_warps of a program that walks along n elements and may store what it has loaded.

    Triton gives an element to several threads where these are more than the elements. All of them load it,
    one stores it, and nothing orders the load of one warp before the store of another.
    """
    elements = max(block(n, most), WARP)
    return {"BLOCK": elements, "num_warps": min(elements // WARP, warps)}
