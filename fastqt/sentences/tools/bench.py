"""Compares the fused loss with eager PyTorch: their values, times and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fastqt.functional import contrastive_loss
from fastqt.sentences.tools.memory import mebibytes, peak_above_results

SIZES = ((400, 1000), (1500, 300), (2048, 1024), (8192, 768))  # (N, D)


def window_matrix(size: int, context_size: int) -> Tensor:
    """The targets of QuickThoughts as a dense matrix, (size, size) float32.

    Each row is uniform over the sentence's neighbours, and 0 elsewhere.
    """
    numbers = torch.arange(size, device="cpu")
    offset = numbers[:, None] - numbers
    near = ((offset.abs() <= context_size) & (offset != 0)).float()
    return near / near.sum(dim=1, keepdim=True)


def eager_contrastive_loss(
    queries: Tensor,  # (N, D)
    candidates: Tensor,  # (N, D)
    targets: Tensor,  # (N, N)
) -> Tensor:
    """The loss that `contrastive_loss` computes, in plain PyTorch with the whole score matrix."""
    scores = (queries @ candidates.T).fill_diagonal_(0)
    return F.kl_div(F.log_softmax(scores, dim=1), targets, reduction="batchmean")


@dataclass(frozen=True)
class Comparison:
    """Fused and eager loss, forward and backward, on random inputs (N, D)."""

    N: int
    D: int
    fused_seconds: float
    eager_seconds: float
    fused_bytes: int | None  # as `fastqt.sentences.tools.memory.peak_above_results` measures them
    eager_bytes: int | None
    loss_difference: float  # relative
    gradient_difference: float  # relative, in the L2 norm


def compare(N: int, D: int, *, context_size: int = 3, repeats: int = 5) -> Comparison:
    """Measures both losses on the CPU, in turns; the medians of the times of `repeats` turns are reported."""
    generator = torch.Generator().manual_seed(0)
    queries, candidates = (
        (torch.randn(N, D, generator=generator, device="cpu") / D**0.25).requires_grad_() for _ in range(2)
    )
    targets = window_matrix(N, context_size)

    def fused() -> list[Tensor]:
        return _with_gradients(contrastive_loss(queries, candidates, context_size=context_size))

    def eager() -> list[Tensor]:
        return _with_gradients(eager_contrastive_loss(queries, candidates, targets))

    def _with_gradients(loss: Tensor) -> list[Tensor]:
        return [loss.detach(), *torch.autograd.grad(loss, [queries, candidates])]

    # What a first call alone allocates, such as the buffers of BLAS, is not counted.
    for function in (fused, eager):
        function()
    fused_result, fused_bytes = peak_above_results(fused)
    eager_result, eager_bytes = peak_above_results(eager)
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
        float((fused_result[0] - eager_result[0]).abs() / eager_result[0].abs()),
        float(
            torch.cat(_minus(fused_result[1:], eager_result[1:])).norm() / torch.cat(eager_result[1:]).norm()
        ),
    )


def _minus(ours: list[Tensor], theirs: list[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def print_comparisons() -> None:
    """Prints one line for each of `SIZES`, as soon as it is measured."""
    print(
        f"contrastive loss, forward and backward, float32, {torch.get_num_threads()} threads; "
        "MiB: peak above inputs and gradients"
    )
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
