"""Matrix products by the native extension on a CPU where its own are used, and by torch elsewhere.

The engine of torch operations, and those of GPUs, multiply by `fastqt.engines.products`. Losses in plain
PyTorch use `multiply_read`, which is both.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fastqt.devices import product_dtype
from fastqt.engines import ops, products
from fastqt.torch_modes import cpu_rounds_float32


@functools.cache
def levels() -> tuple[int, int]:
    """The vector instructions of the extension's products of float32 and of bfloat16; 0: torch's are used."""
    if ops.native_error is not None:
        return 0, 0
    used, rounded, *_ = torch.ops.fastqt.product_levels()
    return used, rounded


def has_slow_bfloat16_vectors() -> bool:
    """Whether this processor's vectors multiply bfloat16 at a lower rate than float32, as Intel's do."""
    return ops.native_error is None and bool(torch.ops.fastqt.product_levels()[-1])


def add_in_float32() -> bool:
    """Whether `multiply` adds up products of float32 in it: torch may be set to round their factors."""
    return levels()[0] != 0 or not cpu_rounds_float32()


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False, bfloat16: bool = False) -> Tensor:
    """Writes a b to `out` and returns it, or adds it with `add`; all three have one dtype.

    Of `out`, (m, n), the rows or the columns are adjacent in memory. With `bfloat16`, factors of float32 are
    rounded to it where the processor multiplies such matrices.
    """
    level = 0
    if a.is_cpu and a.dtype is torch.float32:
        used, rounded = levels()
        level = rounded if bfloat16 and rounded else used
    if level:
        torch.ops.fastqt.own_product_(out, a, b, 1.0, add, level)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)
    return out


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, of two matrices of one dtype."""
    return multiply(a.new_empty(len(a), b.shape[1]), a, b)


def multiply_read(out: Tensor, a: Tensor, b: Tensor, dtype: str, *, add: bool = False) -> Tensor:
    """As `multiply`, of factors that are read in a dtype: "float16", "bfloat16", or else their own.

    Factors of 16 bits are added up in float32, the dtype of all three tensors.
    """
    read = getattr(torch, dtype)
    if read.itemsize != 2:
        return multiply(out, a, b, add=add)
    products.multiply(out, a.to(read), b.to(read), add=add)
    return out


def read_in(x: Tensor) -> str:
    """In which dtype `multiply_read` is to read embeddings: their 16 bits, or what they are computed in."""
    return str(product_dtype(x.device, x.dtype)).removeprefix("torch.")


def product_read(a: Tensor, b: Tensor, dtype: str) -> Tensor:
    """a b, as `multiply_read` has it."""
    return multiply_read(a.new_empty(len(a), b.shape[1]), a, b, dtype)
