"""What CUDA is asked about a device: what it answers for the current one alone, and what never changes."""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def properties(device: torch.device) -> Any:
    """Those of a tensor's GPU, with its name. torch takes several microseconds to look them up."""
    return torch.cuda.get_device_properties(device)


def is_capturing(device: torch.device) -> bool:
    """Whether kernels that are launched on `device` now are recorded into a CUDA graph.

    torch looks at the current stream of the current device, which need not be the one that a tensor is on.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
