"""Matrix products whose last bit depends on their sizes and strides, as it does on some processors.

A product of 4 rows and the same rows within a product of 16 differ in the last bit where the BLAS library
chooses another kernel for the other size. Not every processor shows that. With FASTQT_TEST_ROUNDING=by-size,
each product of torch's on a CPU is changed by at most one unit in the last place, by a rule that depends on
nothing but sizes, strides and dtype: tests that compare the bits of products of other sizes or layouts fail.
Neighbours change in opposite directions, since rounding does not shift a whole product. Products of integers,
or of such over a small power of two, stay exact, as they are on any processor.
"""

import os
import warnings
import zlib
from collections.abc import Callable

import torch
from torch.library import Library, get_kernel

VARIABLE = "FASTQT_TEST_ROUNDING"
PRODUCTS = [
    f"{name}{variant}"
    for name in ("mm", "bmm", "addmm", "addmv", "baddbmm")
    for variant in ("", ".out", "_")
    if f"{name}{variant}" not in ("mm_", "bmm_")
]

# A registration ends with its library.
library: Library | None = None


def units(tensors: tuple[object, ...]) -> int:
    """-1, 0 or 1 unit in the last place, for products of these sizes and strides."""
    kinds = [(tuple(x.shape), x.stride(), x.dtype) for x in tensors if isinstance(x, torch.Tensor)]
    return zlib.crc32(repr(kinds).encode()) % 3 - 1


def change(product: torch.Tensor, by: int) -> None:
    """Adds or takes so many units in the last place; of 16 bits, where a unit is large, for two in 32."""
    if by == 0 or product.dim() == 0 or not product.is_floating_point():
        return
    if bool((product * 1024 == (product * 1024).round()).all()):
        return

    eps = torch.finfo(product.dtype).eps
    step = 2 if product.element_size() > 2 else 32
    product[..., ::step].mul_(1 + by * eps)
    product[..., 1::step].mul_(1 - by * eps)


def changed(kernel: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The kernel of a product with its rounding by size."""

    def call(keys: torch.DispatchKeySet, *tensors: object, **options: object) -> torch.Tensor:
        by = units(tensors)
        product = kernel.call_boxed(keys, *tensors, **options)
        change(product, by)
        return product

    return call


def round_by_size() -> None:
    """Changes the products of this process from here on, where the variable says so."""
    global library
    wanted = os.environ.get(VARIABLE)
    if not wanted or library is not None:
        return
    if wanted != "by-size":
        raise ValueError(f"{VARIABLE}: want by-size, got {wanted}")
    library = Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore", category=UserWarning):  # of a kernel that is replaced
        for name in PRODUCTS:
            kernel = get_kernel(f"aten::{name}", "CPU")
            library.impl(name, changed(kernel), "CPU", with_keyset=True, allow_override=True)
