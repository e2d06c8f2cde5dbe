"""Devices for which torch has the product of two matrices of 16 bits in float32, as on CUDA and XPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastqt import devices

SIXTEEN_BITS = (torch.float16, torch.bfloat16)


@contextmanager
def products_into_float32(key: str) -> Iterator[list[torch.dtype]]:
    """Registers the product for a dispatch key; yields the dtypes of the operands that it is called with."""
    dtypes: list[torch.dtype] = []

    def product(
        self: Tensor,
        a: Tensor,
        b: Tensor,
        out_dtype: torch.dtype,
        *,
        beta: Any = 1,
        alpha: Any = 1,
        out: Tensor,
    ) -> Tensor:
        assert a.dtype is b.dtype in SIXTEEN_BITS
        assert out.dtype is self.dtype is out_dtype is torch.float32
        dtypes.append(a.dtype)
        return out.copy_(torch.addmm(self, a.float(), b.float(), beta=beta, alpha=alpha))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("addmm.dtype_out", product, key)
        devices.has_kernel.cache_clear()
        try:
            yield dtypes
        finally:
            devices.has_kernel.cache_clear()
