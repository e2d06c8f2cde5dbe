"""The loss, forward and backward in float32, beside eager PyTorch and its three matrix products."""

from __future__ import annotations

from functools import partial

import pytest

import fastqt
from benchmarks.measure.baselines import eager_contrastive_loss, loss_products, window_matrix
from benchmarks.measure.timing import beside_products, in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients

REQUIRED = [(400, 1000), (400, 2400), (1500, 300), (2048, 1024), (8192, 768), (16384, 768)]  # (N, D)
CURVE = [(512, 768), (1024, 768), (2048, 768), (4096, 768)]
BEYOND_EAGER = [(32768, 256)]  # where eager PyTorch needs over 12 GB
CASES = [
    *((N, D, "fast") for N, D in REQUIRED + CURVE + BEYOND_EAGER),
    *((N, D, "low") for N, D in [(2048, 1024), (8192, 768)]),
]


@pytest.mark.parametrize(("N", "D", "memory"), CASES)
def test_loss(benchmark, N, D, memory):
    leaves = queries, candidates = embeddings(N, N, D=D)
    fused = forward_and_backward(lambda: fastqt.contrastive_loss(*leaves, memory=memory), *leaves)
    rounds = max(3, min(60, int(2e11 / (N * N * D))))

    fused()
    fused_bytes = peak_above_gradients(fused, leaves)

    products = loss_products(queries, candidates)
    others = {"gemm": partial(products, queries.detach(), candidates.detach())}

    eager_bytes = None
    if (N, D) not in BEYOND_EAGER and memory == "fast":
        targets = window_matrix(N, 1)
        others["eager"] = forward_and_backward(lambda: eager_contrastive_loss(*leaves, targets), *leaves)
        eager_bytes = peak_above_gradients(others["eager"], leaves)

    ours, seconds = in_turns_with(benchmark, fused, others, rounds)

    benchmark.extra_info.update(
        N=N,
        D=D,
        memory=memory,
        rounds=rounds,
        **beside_products(ours, seconds),
        peak_above_gradients=fused_bytes,
        eager_peak_above_gradients=eager_bytes,
    )
