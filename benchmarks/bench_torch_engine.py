"""The engine of torch operations on a CPU, beside eager PyTorch and its three matrix products, in float32.

pytest --benchmark --benchmark-json benchmarks/results/torch-engine.json benchmarks/bench_torch_engine.py

A call on a CPU takes the compiled engine, so this run is stored on its own and `make bench` leaves it out. It
says what the schedule comes to on a device that has no kernels.
"""

from __future__ import annotations

from functools import partial

import pytest

import fastqt
from benchmarks.measure.baselines import eager_contrastive_loss, loss_products, window_matrix
from benchmarks.measure.timing import beside_products, in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients

SIZES = [(1024, 768), (2048, 1024), (4096, 768), (8192, 768)]  # (N, D)


@pytest.mark.parametrize(("N", "D"), SIZES)
def test_torch_engine(benchmark, N, D):
    leaves = queries, candidates = embeddings(N, N, D=D)
    compute = partial(fastqt.contrastive_loss, *leaves, backend="torch")
    ours, targets = forward_and_backward(compute, *leaves), window_matrix(N, 1)
    eager = forward_and_backward(lambda: eager_contrastive_loss(*leaves, targets), *leaves)
    rounds = max(3, min(60, int(2e11 / (N * N * D))))

    ours()
    peaks = [peak_above_gradients(function, leaves) for function in (ours, eager)]
    products = partial(loss_products(queries, candidates), queries.detach(), candidates.detach())
    seconds, others = in_turns_with(benchmark, ours, {"gemm": products, "eager": eager}, rounds)
    benchmark.extra_info.update(
        N=N,
        D=D,
        rounds=rounds,
        **beside_products(seconds, others),
        peak_above_gradients=peaks[0],
        eager_peak_above_gradients=peaks[1],
    )
