"""Gradients times the upstream gradient, in place: nothing is read or written where that is 1.

Only the device knows the upstream gradient. In nearly every training it is 1: to multiply by it would read
and write all gradients once more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastqt.kernels.launch import INTERPRETED, cdiv, multiprocessors, on_device
from fastqt.kernels.plan import BELOW_16, Launched, driver, may_be_repeated, noted, planned

BLOCK = 256 if INTERPRETED else 4096  # elements that a program multiplies at once
PROGRAMS = 4  # for each multiprocessor
AT_ONCE = 4  # gradients of one launch
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_KNOWN = 256  # launches; after so many all are forgotten

_known: dict[Hashable, Launched] = {}


@triton.jit
def scale_elements(gradient, size, factor, BLOCK: tl.constexpr):
    """Multiplies a program's share of a gradient."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, size, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        scaled = tl.load(gradient + at, mask=at < size, other=0.0).to(tl.float32) * factor
        tl.store(gradient + at, scaled.to(gradient.dtype.element_ty), mask=at < size)


@planned
@triton.jit
def scale_gradients_kernel(
    upstream,  # () float32
    multiplier,
    size,  # elements of the first gradient, and of the others
    second_size,
    third_size,
    fourth_size,
    first,
    BLOCK: tl.constexpr,
    second=None,
    third=None,
    fourth=None,
):
    """Multiplies up to four gradients by upstream * multiplier, in float32."""
    factor = tl.load(upstream) * multiplier
    if factor != 1.0:  # which is so where it is not a number
        scale_elements(first, size, factor, BLOCK)
        if second is not None:
            scale_elements(second, second_size, factor, BLOCK)
        if third is not None:
            scale_elements(third, third_size, factor, BLOCK)
        if fourth is not None:
            scale_elements(fourth, fourth_size, factor, BLOCK)


def scalable(gradient: Tensor, upstream: Tensor) -> bool:
    """Whether `scale_gradients` takes a gradient."""
    known = gradient.dtype in DTYPES and upstream.dtype is torch.float32
    return known and gradient.device == upstream.device and gradient.is_contiguous()


def scale_gradients(gradients: Sequence[Tensor], upstream: Tensor, multiplier: float) -> None:
    """Multiplies gradients in place by upstream * multiplier, a power of 2, if that is not 1.

    They are contiguous, in float32, bfloat16 or float16. Nothing waits for `upstream`, () float32 on their
    device.
    """
    for start in range(0, len(gradients), AT_ONCE):
        some = gradients[start : start + AT_ONCE]
        tensors = (upstream, *some)
        addresses = [x.data_ptr() for x in tensors]
        kind = (
            upstream.device,
            multiplier,
            *[(x.shape, x.dtype) for x in some],
            *[address & BELOW_16 for address in addresses],
        )

        with on_device(upstream):
            known = _known.get(kind)
            if known is not None and may_be_repeated([known.kernel]):
                _repeat(known, addresses)
                continue

            with noted() as launches:
                _launch(some, upstream, multiplier)
            if launches and launches[0] is not None:
                if len(_known) >= MOST_KNOWN:
                    _known.clear()
                _known[kind] = launches[0]


def _launch(gradients: Sequence[Tensor], upstream: Tensor, multiplier: float) -> None:
    first, *others = gradients
    sizes = [x.numel() for x in gradients]
    names = ("second", "third", "fourth")

    programs = min(cdiv(max(sizes), BLOCK), PROGRAMS * multiprocessors(first))

    scale_gradients_kernel[(max(programs, 1),)](
        upstream,
        multiplier,
        *sizes,
        *[0] * (AT_ONCE - len(sizes)),
        first,
        BLOCK=BLOCK,
        **dict(zip(names, others, strict=False)),
        num_warps=8,
        enable_fp_fusion=True,
    )


def _repeat(launch: Launched, addresses: Sequence[int]) -> None:
    """Repeats a launch with the upstream gradient and the gradients at other addresses."""
    arguments = list(launch.arguments)
    for place, address in zip(launch.pointers, addresses, strict=True):
        arguments[place] = address
    launch.repeat(driver.active.get_current_stream(driver.active.get_current_device()), arguments)
