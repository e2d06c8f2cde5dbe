"""Finds products of 16 bits whose operands have something between their rows, which some processors read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "mv", "addmv", "addmv_"}


class NoGaps(TorchDispatchMode):
    """An operand of 16 bits of torch's products has lines that follow each other, or zeros between them."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in PRODUCTS:
            for x in tree_leaves(args):
                assert not (isinstance(x, Tensor) and x.is_cpu and has_gaps(x)), (
                    function,
                    x.shape,
                    x.stride(),
                )
        return function(*args, **(kwargs or {}))


def has_gaps(x: Tensor) -> bool:
    if x.dtype not in (torch.bfloat16, torch.float16) or x.dim() < 2 or 0 in x.shape:
        return False
    line = -2 if x.stride(-1) == 1 else -1
    across = -3 - line
    if x.stride(across) != 1 or x.shape[line] == 1 or x.stride(line) <= x.shape[across]:
        return False
    for matrix in x.flatten(0, -3) if x.dim() > 2 else [x]:
        lines, pitch = matrix.shape[line], matrix.stride(line)
        gaps = matrix.as_strided((lines - 1, pitch), (pitch, 1))[:, matrix.shape[across] :]
        if gaps.any():  # of NaN, too
            return True
    return False
