"""The fused loss beside its eager equivalent: how far apart, how long, how much memory."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fastqt.functional import contrastive_loss

SIZES = ((400, 1000), (1500, 300), (2048, 1024), (8192, 768))  # (N, D)
MIB = 1 << 20


def window_matrix(size: int, context_size: int) -> Tensor:
    """The targets of QuickThoughts as a matrix (size, size): rows uniform over neighbours, 0 elsewhere."""
    offset = torch.arange(size)[:, None] - torch.arange(size)
    near = ((offset.abs() <= context_size) & (offset != 0)).float()
    return near / near.sum(dim=1, keepdim=True)


def eager_contrastive_loss(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
    targets: Tensor,  # (N, N)
) -> Tensor:
    """What `contrastive_loss` replaces: the score matrix, its diagonal set to 0, torch's KL divergence."""
    scores = (queries @ candidates.T).fill_diagonal_(0)
    return F.kl_div(F.log_softmax(scores, dim=1), targets, reduction="batchmean")


@dataclass(frozen=True)
class Comparison:
    """Fused against eager, forward and backward, on random inputs (N, D)."""

    N: int
    D: int
    fused_seconds: float
    eager_seconds: float
    fused_bytes: int | None  # peak above inputs and targets; None where the system does not tell
    eager_bytes: int | None
    loss_difference: float  # relative
    gradient_difference: float  # relative, in the L2 norm


def compare(N: int, D: int, *, context_size: int = 3, repeats: int = 5) -> Comparison:
    """Measures both losses on the CPU, taking turns; times are medians of `repeats`."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (
        (torch.randn(N, D, generator=generator) / D**0.25).requires_grad_() for _ in range(2)
    )
    targets = window_matrix(N, context_size)

    def fused() -> list[Tensor]:
        return _with_gradients(contrastive_loss(queries, candidates, context_size=context_size))

    def eager() -> list[Tensor]:
        return _with_gradients(eager_contrastive_loss(queries, candidates, targets))

    def _with_gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, [queries, candidates])]

    ours, fused_bytes = peak_memory(fused)
    theirs, eager_bytes = peak_memory(eager)
    times: dict[Callable[[], list[Tensor]], list[float]] = {fused: [], eager: []}
    for _ in range(repeats):
        for function, seconds in times.items():
            begin = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - begin)
    return Comparison(
        N,
        D,
        _median(times[fused]),
        _median(times[eager]),
        fused_bytes,
        eager_bytes,
        float((ours[0] - theirs[0]).abs() / theirs[0].abs()),
        float(torch.cat(_minus(ours[1:], theirs[1:])).norm() / torch.cat(theirs[1:]).norm()),
    )


def peak_memory(function: Callable[[], list[Tensor]]) -> tuple[list[Tensor], int | None]:
    """A function's result, and by how many bytes the process grew at most while it ran (Linux)."""
    status = Path("/proc/self/status")
    # What malloc holds on to would be used again unseen.
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is in use
    except OSError:
        return function(), None
    before = _status_bytes(status, "VmRSS")
    result = function()
    return result, max(_status_bytes(status, "VmHWM") - before, 0)


def _status_bytes(status: Path, name: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _minus(ours: list[Tensor], theirs: list[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def table() -> None:
    """Prints a comparison for each of `SIZES` as it is made."""
    print(f"contrastive loss, forward and backward, float32, {torch.get_num_threads()} threads")
    print(
        f"{'N':>7} {'D':>6} {'eager ms':>10} {'fused ms':>10} {'faster':>8} "
        f"{'eager MiB':>10} {'fused MiB':>10}"
    )
    for N, D in SIZES:
        result = compare(N, D)
        print(
            f"{N:>7} {D:>6} {result.eager_seconds * 1e3:>10.1f} {result.fused_seconds * 1e3:>10.1f} "
            f"{result.eager_seconds / result.fused_seconds:>7.2f}x "
            f"{mebibytes(result.eager_bytes):>10} {mebibytes(result.fused_bytes):>10}",
            flush=True,
        )


def mebibytes(size: int | None) -> str:
    """Bytes as MiB, or a dash for what is not known."""
    return "-" if size is None else f"{size / MIB:.1f}"
