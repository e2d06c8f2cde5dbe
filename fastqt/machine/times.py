"""The table of `fastqt check`: time and peak memory of losses on a device, beside eager PyTorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fastqt.losses.clip import clip_loss
from fastqt.losses.info_nce import info_nce_loss
from fastqt.machine.cases import Inputs, of_clip, of_cosines, two_sides, two_views
from fastqt.machine.memory import above, mebibytes, peak_above_results
from fastqt.machine.verdicts import in_words, name_of

ON_CPU, ON_GPU, QUICK = (2048, 256), (8192, 768), (192, 32)  # (N, D) of what is measured
REPEATS = 5
LATE = "not measured, as the time was over"

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Measurement:
    """A loss with its gradients, (N, D) against (N, D)."""

    loss: str
    contestant: str
    N: int
    D: int
    dtype: str
    seconds: float | None  # the median; None where it could not be computed
    peak_bytes: int | None  # above inputs and results; None where the device does not report it
    message: str = ""  # why it could not be computed


def measure(device: torch.device, quick: bool = False, end: float = math.inf) -> list[Measurement]:
    """Measures two losses by eager PyTorch, and by the engine that they choose in both memory modes.

    What has not begun when `time.monotonic()` is `end` is not measured.
    """
    N, D = QUICK if quick else ON_CPU if device.type == "cpu" else ON_GPU
    dtype = torch.float32 if device.type == "cpu" or not _has_bfloat16(device) else torch.bfloat16

    measurements = []
    for name, loss, formula, make in (
        ("InfoNCE", info_nce_loss, of_cosines, partial(two_sides, N, N, N // 8, D)),
        ("CLIP", clip_loss, of_clip, partial(two_views, N, N, 0, D)),
    ):
        inputs = {n: x.to(dtype) if x.ndim else x for n, x in make().items()}
        contestants: dict[str, Callable[..., Tensor]] = {
            "eager": lambda formula=formula, **x: formula(**x).mean(),
            "fastqt": loss,
            "fastqt, memory=low": partial(loss, memory="low"),
        }
        for contestant, function in contestants.items():
            seconds, peak, message = _measured(function, inputs, device, end)
            measurements.append(Measurement(name, contestant, N, D, name_of(dtype), seconds, peak, message))
    return measurements


def lines(measurements: list[Measurement]) -> list[str]:
    """The table as text, whose first line names the columns."""
    table = [f"  {'loss':<8} {'':<19} {'ms':>9} {'MiB':>8}"]
    for m in measurements:
        milliseconds = "-" if m.seconds is None else f"{m.seconds * 1e3:,.1f}"
        figures = f"{milliseconds:>9} {mebibytes(m.peak_bytes):>8}"
        table.append(f"  {m.loss:<8} {m.contestant:<19} {figures}  {m.message}".rstrip())
    return table


def _measured(
    loss: Callable[..., Tensor], inputs: Inputs, device: torch.device, end: float
) -> tuple[float | None, int | None, str]:
    """The seconds of a step, its peak of memory, and why it has none. The inputs are on the CPU."""
    leaves: Inputs = {}

    def step() -> list[Tensor]:
        value = loss(**leaves)
        return [value.detach(), *torch.autograd.grad(value, list(leaves.values()))]

    if time.monotonic() >= end:
        return None, None, LATE
    try:
        leaves.update({n: x.detach().to(device).requires_grad_() for n, x in inputs.items()})
        step()  # The first one compiles kernels, and allocates what others use again.
        peak = _peak(step, device)
        seconds = [_seconds(step, device)]
        while len(seconds) < REPEATS and time.monotonic() < end:
            seconds.append(_seconds(step, device))
    except Exception as error:  # Triton and drivers of devices raise errors of their own kinds.
        return None, None, in_words(error)
    return sorted(seconds)[len(seconds) // 2], peak, ""


def _seconds(step: Step, device: torch.device) -> float:
    _synchronize(device)
    begin = time.perf_counter()
    step()
    _synchronize(device)
    return time.perf_counter() - begin


def _peak(step: Step, device: torch.device) -> int | None:
    """The peak of memory above inputs and results; None on a device that does not report it."""
    if device.type == "cpu":
        return peak_above_results(step)[1]
    if device.type not in ("cuda", "xpu"):
        return None

    statistics = torch.cuda if device.type == "cuda" else torch.xpu
    _synchronize(device)
    before = statistics.memory_allocated(device)
    statistics.reset_peak_memory_stats(device)
    results = step()
    _synchronize(device)
    return above(statistics.max_memory_allocated(device) - before, results)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _has_bfloat16(device: torch.device) -> bool:
    """Whether torch multiplies matrices of bfloat16 on a device."""
    try:
        x = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        return bool((x @ x).isfinite().all())
    except (RuntimeError, TypeError):
        return False
