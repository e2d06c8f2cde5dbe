"""What all launchers share: is Triton interpreting, on which device, in which arithmetic, in what tiles."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Decided when the kernels are imported, as by Triton itself.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

ROWS_AT_ONCE = 8  # of a program that reads a row's sums over blocks of columns


@dataclass(frozen=True)
class Config:
    """How a matrix product is cut into tiles.

    Attributes:
        rows, columns, width: of a tile of the result, and of a step along the inner dimension.
        group: as many blocks of rows are walked together, for what they share to stay in the L2 cache.
        warps, stages: of a program; stages are loads in flight ahead of the tensor cores.
        descriptors: operands that allow it are copied by the unit that Hopper has for it, not by threads.
    """

    rows: int = 128
    columns: int = 128
    width: int = 64
    group: int = 8
    warps: int = 8
    stages: int = 3
    descriptors: bool = False


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype of a product's operands. The interpreter has numpy's dtypes, bfloat16 not among them."""
    if INTERPRETED:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]


def precision() -> str:
    """Of products of float32, as torch is set."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def on_device(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches go to the current device: make it that of `x`."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


def programs(x: Tensor, tiles: int) -> int:
    """A grid for a kernel that walks over its tiles and mostly has none to do: one wave."""
    return min(tiles, multiprocessors(x))


def multiprocessors(x: Tensor) -> int:
    """Of the device of `x`; without one as few as leave each program something to do."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4


def block(n: int, most: int) -> int:
    """The power of two from which n elements are covered, at most `most` at a time."""
    return min(triton.next_power_of_2(n), most)
