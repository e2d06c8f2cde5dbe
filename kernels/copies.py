"""Embeddings as matrix products want them: rows at multiples of 16 bytes, float32 rounded to TF32."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import ROWS_AT_ONCE, block, cdiv, on_device
from fastqt.kernels.plan import planned
from fastqt.kernels.tf32 import rounded_to_tf32

COPIED_BYTES = 16  # at a time, of one element or more


@planned
@triton.jit(do_not_specialize=["rows"])
def copy_rows_kernel(
    matrix,  # (rows, width)
    copy,  # (rows, units * UNIT), contiguous; 0 beyond the width
    rows,
    width,
    units,
    row_stride,
    stride,
    ROUND: tl.constexpr,  # to TF32
    UNIT: tl.constexpr,  # elements that are stored at a time
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some rows per program."""
    # Offsets within a row have 64 bits: the rows of a transposed matrix are as long as the matrix.
    stride = tl.cast(stride, tl.int64)
    length = units * UNIT

    i = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside_rows = (i < rows)[:, None]

    for start in range(0, length, BLOCK):
        d = start + tl.arange(0, BLOCK)
        at = matrix + i[:, None] * row_stride + d[None, :] * stride
        x = tl.load(at, mask=inside_rows & (d < width)[None, :], other=0.0)
        if ROUND:
            x = rounded_to_tf32(x)
        tl.store(copy + i[:, None] * length + d[None, :], x, mask=inside_rows & (d < length)[None, :])


def unit_of(x: Tensor) -> int:
    """How many elements are 16 bytes."""
    return COPIED_BYTES // x.element_size()


def is_aligned(x: Tensor) -> bool:
    """Whether all rows of a matrix can be read, and written, in whole 16 bytes."""
    unit = unit_of(x)
    at_multiples = x.stride(0) % unit == 0 and x.data_ptr() % COPIED_BYTES == 0
    return x.stride(1) == 1 and x.shape[1] % unit == 0 and at_multiples


def copy_rows(x: Tensor, width: int, *, rounded: bool) -> Tensor:
    """A copy (rows, width) of (rows, D), with zeros beyond D. `width` is a multiple of 16 bytes.

    `rounded` float32 values are the nearest of TF32.
    """
    rows, D = x.shape
    copy = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    with on_device(x):
        copy_rows_kernel[(cdiv(rows, ROWS_AT_ONCE),)](
            x,
            copy,
            rows,
            D,
            width // unit_of(x),
            *x.stride(),
            ROUND=rounded,
            UNIT=unit_of(x),
            BLOCK_ROWS=ROWS_AT_ONCE,
            BLOCK=block(width, 256),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return copy
