"""Matrix products in torch's own operations, which add up in float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.devices import INTO_FLOAT32, has_kernel, is_described


def multiply(out: Tensor, a: Tensor, b: Tensor, *, add: bool) -> None:
    """out (+)= a b, where `out` has the dtype of `a` and `b`, or float32 where they have 16 bits."""
    if is_described():
        return
    if a.is_cpu and a.element_size() == 2:
        a, b = _with_adjacent_lines(a), _with_adjacent_lines(b)
    if out.dtype is a.dtype:
        out.addmm_(a, b, beta=int(add))
    elif a.is_cuda or has_kernel(INTO_FLOAT32, a.device.type):
        torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, beta=int(add), alpha=1, out=out)
    else:
        out.addmm_(a.float(), b.float(), beta=int(add))


def _with_adjacent_lines(x: Tensor) -> Tensor:
    """A matrix between whose rows or columns is nothing, which torch reads of 16 bits on some processors."""
    return x if x.is_contiguous() or x.T.is_contiguous() else x.contiguous()
