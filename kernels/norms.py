"""Inverse norms of rows, by which kernels score by cosine without normalised copies.

With a_i and b_j the inverse norms of query i and candidate j, a score is s a_i b_j <f_i, g_j>. What is stored
of E for the products is multiplied by b_j, and by a_i where it has its row's weight. The gradient epilogues
apply the inverse norms that are left, and finish the derivative of f / |f|.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import block, on_device
from fastqt.kernels.plan import planned

LEAST_NORM = tl.constexpr(1e-12)  # as in torch.nn.functional.normalize: a shorter row is divided by this
# The inverse norm of rows that are divided by a constant: their gradient has a part along the row.
MOST_INVERSE = tl.constexpr(0.9999e12)


@planned
@triton.jit
def inverse_norms_kernel(
    rows,
    inverse_norms,  # (rows,) float32
    width,
    row_stride,
    stride,
    BLOCK: tl.constexpr,
):
    """One row per program. Elements are divided by the largest one, so that no square overflows."""
    # Offsets within a row have 64 bits: the rows of a transposed matrix are as long as the matrix.
    stride = tl.cast(stride, tl.int64)
    i = tl.program_id(0).to(tl.int64)
    row = rows + i * row_stride

    magnitudes = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(row + d * stride, mask=d < width, other=0.0).to(tl.float32)
        magnitudes = tl.maximum(magnitudes, tl.abs(x))
    largest = tl.max(magnitudes, 0)
    divisor = tl.where(largest > 0, largest, 1.0)

    squares = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        x = tl.load(row + d * stride, mask=d < width, other=0.0).to(tl.float32)
        x = tl.div_rn(x, tl.zeros_like(x) + divisor)
        squares += x * x

    norm = largest * tl.sqrt_rn(tl.sum(squares, 0))
    # A NaN stays: the comparison is false for it.
    tl.store(inverse_norms + i, tl.div_rn(1.0, tl.where(norm < LEAST_NORM, LEAST_NORM, norm)))


@triton.jit
def store_through_norms(
    gradient,  # (width,), written
    scale,
    unfinished,  # (width,) float32, in memory: the gradient of x / |x|, divided by |x|
    inverse_norm,
    dots,  # (BLOCK,): their sum is the inner product of x and `unfinished`
    x,
    stride,
    width,
    BLOCK: tl.constexpr,
):
    """Stores the gradient of a row x, times a scale, from that of x / |x|."""
    # A product that is added up at once would be fused with an addition that two threads make, each with
    # another rounding. So the norm comes after the sum.
    along = tl.where(inverse_norm < MOST_INVERSE, inverse_norm * tl.sum(dots, 0), 0.0)
    tl.debug_barrier()  # Other threads may have stored what this one loads.
    for start in range(0, width, BLOCK):
        d = start + tl.arange(0, BLOCK)
        inside = d < width
        unit = inverse_norm * tl.load(x + d * stride, mask=inside, other=0.0).to(tl.float32)
        finished = tl.load(unfinished + d, mask=inside, other=0.0) - along * unit
        tl.store(gradient + d, (scale * finished).to(gradient.dtype.element_ty), mask=inside)


def inverse_norms(x: Tensor) -> Tensor:
    """1 / max(norm, 1e-12) of each row of (rows, D), (rows,) float32."""
    rows, D = x.shape
    inverses = x.new_empty(rows, dtype=torch.float32)
    with on_device(x):
        inverse_norms_kernel[(rows,)](
            x,
            inverses,
            D,
            *x.stride(),
            BLOCK=block(D, 1024),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return inverses
