"""How kernels address a matrix: how many elements at once, in how many bits, and by which descriptor."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

DESCRIBED_BYTES = 2**40  # a row stride must be less where a tensor descriptor says where a matrix lies


def elements_at_once(queries: Tensor, *candidates: Tensor) -> int:
    """How many elements are copied at a time: sixteen bytes where all rows begin at multiples of them.

    Else these are single elements, with an address each, of which a program can hold only so many.
    """
    unit = 16 // queries.element_size()
    rows = (queries.shape[1], queries.stride(0), *[matrix.stride(0) for matrix in candidates])
    return 1 if any(n % unit for n in rows) else unit


def far(*tiles: tuple[Tensor | None, int, int]) -> bool:
    """Whether some offset within a tile of a matrix, of so many rows and columns, does not fit 32 bits.

    Code for such matrices takes more registers, so that others have code of their own.
    """
    return any(
        x is not None and rows * x.stride(0) + columns * x.stride(1) >= 2**31 for x, rows, columns in tiles
    )


def has_descriptor(x: Tensor) -> bool:
    """Whether a tensor descriptor can say where a matrix lies whose row stride is of whole 16 bytes."""
    expressible = x.shape[1] <= x.stride(0) < DESCRIBED_BYTES // x.element_size()
    return x.stride(1) == 1 and expressible and x.data_ptr() % 16 == 0


@triton.jit
def strides_of_64_bits(strides):
    """Strides whose products with offsets within a tile do not fit 32 bits."""
    rows, columns = strides
    return tl.cast(rows, tl.int64), tl.cast(columns, tl.int64)
