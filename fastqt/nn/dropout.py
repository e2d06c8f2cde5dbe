"""Dropout whose masks are cheap to draw on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastqt.autograd.transformed import is_transformed
from fastqt.torch_modes import is_traced

LEVELS = 1 << 16  # of a random number, of which four come from one draw of 64 bits


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, which on a CPU draws 16 bits for each element.

    torch draws 53 bits for each element there, one element after the other on one thread, which takes much of
    the time of a Transformer's step. With 16 bits the probability is the multiple of 1 / 65,536 that is
    nearest to p, and kept elements are divided by one minus that, so that the expected value is the input.
    The bits are those of torch's generator. On other devices, under transforms of `torch.func`, and where
    torch compiles, this is torch's dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input with elements set to zero, each with probability p; the input itself in evaluation."""
        dropped = round(self.p * LEVELS)
        draws_bits = self.training and 0 < dropped < LEVELS and not self.inplace
        if not draws_bits or not _is_plain(input):
            return super().forward(input)

        words = torch.empty(-(-input.numel() // 4), dtype=torch.int64, device="cpu")
        levels = words.random_(-(1 << 63), None).view(torch.int16)[: input.numel()].view(input.shape)
        noise = (levels >= dropped - LEVELS // 2).to(input.dtype)
        return input * noise.mul_(LEVELS / (LEVELS - dropped))


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor has numbers on a CPU, and no transform or tracer records what is done with it."""
    return x.device.type == "cpu" and not (is_traced(x) or is_transformed())
