"""Dropout whose random numbers are cheap to draw on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fastqt.autograd.transformed import is_transformed
from fastqt.torch_modes import PLAIN

LEVELS = 1 << 16  # of a random number; one draw of 64 bits makes four of them


class Dropout(nn.Dropout):
    """`torch.nn.Dropout`, which on a CPU draws 16 bits for each element.

    torch draws 53 bits for each element there, unless MKL draws for it, and that takes much of the time of a
    Transformer's step in training. With 16 bits the probability is the multiple of 1 / 65,536 that is nearest
    to p, and what is kept is divided by one minus that, so that the expected value is the input. The bits are
    those of torch's generator. A compiled module draws the same ones, because the drawing is an operator into
    which the compiler does not look. On other devices, for subclasses of tensors, and under the transforms of
    `torch.func`, this is torch's dropout.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The input with elements set to zero, each with probability p; the input itself in evaluation."""
        dropped = round(self.p * LEVELS)
        draws = self.training and 0 < dropped < LEVELS and not self.inplace
        if not draws or not input.is_cpu or type(input) not in PLAIN:
            return super().forward(input)

        if torch.compiler.is_compiling():
            # torch merges equal calls of an operator that is not its own, even of a random one. It never
            # takes two new tensors for one, so calls that are given a new tensor each are not equal.
            call = torch.empty(0, device="cpu")
            noise: Tensor = dropout_noise(call, input.shape, input.dtype, dropped)
            return input * noise
        if is_transformed():
            return super().forward(input)
        return input * _noise(input.shape, input.dtype, dropped)


def _noise(shape: Sequence[int], dtype: torch.dtype, dropped: int) -> Tensor:
    """Factors of a dropout: 0 with probability dropped / LEVELS, otherwise 1 over the share that is kept."""
    noise = torch.empty(shape, dtype=dtype, device="cpu")
    words = torch.empty(-(-noise.numel() // 4), dtype=torch.int64, device="cpu")
    levels = words.random_(-(1 << 63), None).view(torch.int16)[: noise.numel()].view(noise.shape)

    # A comparison that writes numbers takes half the time of one whose truth values are converted to numbers.
    torch.ge(levels, dropped - LEVELS // 2, out=noise)
    return noise.mul_(LEVELS / (LEVELS - dropped))


# The tag keeps a compiler from drawing again in the backward pass.
@torch.library.custom_op("fastqt::dropout_noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def dropout_noise(call: Tensor, shape: Sequence[int], dtype: torch.dtype, dropped: int) -> Tensor:
    """`_noise` as an operator. `call` holds nothing, and is another tensor in each call."""
    return _noise(shape, dtype, dropped)


@dropout_noise.register_fake
def _(call: Tensor, shape: Sequence[int], dtype: torch.dtype, dropped: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")
