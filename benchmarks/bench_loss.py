"""The loss, forward and backward in float32, beside eager PyTorch and the matrix products it is made of."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fastqt
from benchmarks.measure.baselines import eager_contrastive_loss, loss_products, window_matrix
from benchmarks.measure.timing import in_turns_with
from fastqt.tools.bench import peak_memory

REQUIRED = [(400, 1000), (400, 2400), (1500, 300), (2048, 1024), (8192, 768), (16384, 768)]  # (N, D)
CURVE = [(512, 768), (1024, 768), (2048, 768), (4096, 768)]
BEYOND_EAGER = [(32768, 256)]  # where eager PyTorch needs over 12 GB
CASES = [
    *((N, D, "fast") for N, D in REQUIRED + CURVE + BEYOND_EAGER),
    *((N, D, "low") for N, D in [(2048, 1024), (8192, 768)]),
]


def inputs(N: int, D: int) -> list[torch.Tensor]:
    """Queries and candidates whose scores vary about as much as a trained model's."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(N, D, generator=generator) / D**0.25).requires_grad_() for _ in range(2)]


def forward_and_backward(loss, *leaves: torch.Tensor):
    def run() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss().backward()

    return run


@pytest.mark.parametrize(("N", "D", "memory"), CASES)
def test_loss(benchmark, N, D, memory):
    queries, candidates = inputs(N, D)
    fused = forward_and_backward(
        lambda: fastqt.contrastive_loss(queries, candidates, memory=memory), queries, candidates
    )
    rounds = max(3, min(60, int(2e11 / (N * N * D))))
    fused()
    queries.grad = candidates.grad = None
    gradients = 2 * N * D * 4
    _, fused_bytes = peak_memory(lambda: [fused()])
    products = loss_products(queries, candidates)
    others = {"gemm": partial(products, queries.detach(), candidates.detach())}
    eager_bytes = None
    if (N, D) not in BEYOND_EAGER and memory == "fast":
        targets = window_matrix(N, 1)
        others["eager"] = forward_and_backward(
            lambda: eager_contrastive_loss(queries, candidates, targets), queries, candidates
        )
        queries.grad = candidates.grad = None
        _, eager_bytes = peak_memory(lambda: [others["eager"]()])
    ours, seconds = in_turns_with(benchmark, fused, others, rounds)
    benchmark.extra_info.update(
        N=N,
        D=D,
        memory=memory,
        rounds=rounds,
        gemm_seconds=seconds["gemm"],
        eager_seconds=seconds.get("eager"),
        ratio_to_gemm=ours / seconds["gemm"],
        eager_ratio_to_gemm=seconds["eager"] / seconds["gemm"] if "eager" in seconds else None,
        peak_above_gradients=None if fused_bytes is None else fused_bytes - gradients,
        eager_peak_above_gradients=None if eager_bytes is None else eager_bytes - gradients,
    )
