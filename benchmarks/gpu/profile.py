"""Which kernels run, and for how long each, as torch.profiler says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from benchmarks.gpu import peers
from benchmarks.gpu.peers import Contestant, make_inputs
from benchmarks.gpu.sections import Options, Record, progress
from benchmarks.gpu.shapes import DRY_SHAPES, SHAPES, Shape
from benchmarks.measure.errors import shortened, words
from benchmarks.measure.timing import Clock

MOST_KERNELS = 16  # of a step that are kept, those that take longest
MOST_OF_A_NAME = 160  # characters


def kernels_of(
    function: Callable[[], object], device: torch.device, calls: int = 1
) -> tuple[list[dict[str, Any]], str | None]:
    """The kernels of a call by the time that they take, and why there are none.

    Returns:
        Name, count and seconds of each, for one call, and None; or nothing, and the reason in words. A CPU's
        "kernels" are torch's operators.
    """
    on_gpu = device.type == "cuda"
    clock = Clock(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]

    clock.wait()
    try:
        with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
            for _ in range(calls):
                function()
            clock.wait()

        kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
        kernels = [
            {
                "name": shortened(event.key, MOST_OF_A_NAME),
                "count": event.count / calls,
                "seconds": (event.self_device_time_total if on_gpu else event.self_cpu_time_total)
                / calls
                / 1e6,
            }
            for event in profiler.key_averages()
            if event.device_type == kind
        ]
    except Exception as error:  # a machine may not let its counters be read, and what is timed stays of use
        return [], words(error)

    kernels.sort(key=lambda kernel: -kernel["seconds"])
    return kernels, None if kernels else "the profiler saw nothing on the device"


def profile(options: Options) -> Iterator[Record]:
    """The kernels of whole steps of the loss, with the time that launching them takes."""
    shapes = DRY_SHAPES[:1] if options.dry_run else (SHAPES[0], SHAPES[2], SHAPES[3])
    dtype = torch.float16 if options.dry_run else torch.bfloat16
    chosen = [(shape, memory) for shape in shapes for memory in ("fast", "low")]
    for shape, memory in chosen:
        yield {"kind": "profile", **step_profile(shape, memory, dtype, options.device)}


def step_profile(shape: Shape, memory: str, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    make: Contestant = peers.fused_window(memory)
    step, clock = make(make_inputs(shape, dtype, device, sets=1)), Clock(device)
    for _ in range(2):
        step(0)
        progress()
    clock.wait()

    begin = time.perf_counter()
    step(0)
    launching = time.perf_counter() - begin
    clock.wait()

    kernels, reason = kernels_of(lambda: step(0), device)
    return {
        "shape": shape.name,
        "memory": memory,
        "seconds_to_launch": launching,
        "kernel_seconds": sum(kernel["seconds"] for kernel in kernels),
        "launches": sum(kernel["count"] for kernel in kernels),
        "kernels": kernels[:MOST_KERNELS],
        "reason": reason,
    }
