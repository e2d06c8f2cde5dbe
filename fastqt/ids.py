"""Integers that users give, such as labels and groups, as int64."""

from __future__ import annotations

import torch
from torch import Tensor

from fastqt.checks import INTEGERS, check_tensor, require


def as_ids(name: str, ids: Tensor) -> Tensor:
    """Converts a 1-D tensor of integers, whose values int64 holds, to int64."""
    check_tensor(name, ids)
    if ids.dim() != 1:
        advice = "; make it 1-D by flatten()" if ids.numel() == max(ids.shape, default=0) else ""
        raise ValueError(f"{name}: want a 1-D tensor of integers, got shape {tuple(ids.shape)}{advice}")
    if ids.dtype not in INTEGERS:
        raise TypeError(f"{name}: want an integer dtype, got {ids.dtype}; convert it by long()")
    if ids.dtype is torch.uint64:
        require((ids.view(torch.int64) >= 0).all(), f"{name}: want values below 2**63, got greater ones")
    return ids.long()
