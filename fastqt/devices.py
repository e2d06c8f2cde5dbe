"""What CUDA answers for the current device alone, asked about any device."""

from __future__ import annotations

import torch


def is_capturing(device: torch.device) -> bool:
    """Whether kernels that are launched on `device` now are recorded into a CUDA graph.

    torch looks at the current stream of the current device, which need not be the one that a tensor is on.
    """
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
