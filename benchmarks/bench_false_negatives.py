"""InfoNCE of cosines with a margin for false negatives, beside the same without it and with a guide.

pytest --benchmark --benchmark-json benchmarks/results/margin.json benchmarks/bench_false_negatives.py

The guide has the same embeddings and filters nearly the same cells, by a product of its own in float64. The
run is stored on its own, and `make bench` leaves it out.
"""

from __future__ import annotations

from functools import partial

import pytest
from torch import Tensor

import fastqt
from benchmarks.measure.baselines import loss_products
from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients

SIZES = [(400, 1000), (2048, 768), (4096, 768), (8192, 768)]  # (N, D)
MARGIN = 0.1


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(("N", "D"), SIZES)
def test_false_negatives(benchmark, N, D, backend):
    leaves = queries, candidates = embeddings(N, N, D=D)
    loss = partial(fastqt.info_nce_loss, *leaves, backend=backend)

    def guided() -> Tensor:
        return loss(exclude=fastqt.Guide(*leaves, margin=-MARGIN))

    ours = forward_and_backward(partial(loss, exclude=fastqt.Margin(MARGIN)), *leaves)
    others = {
        "gemm": partial(loss_products(queries, candidates), queries.detach(), candidates.detach()),
        "without": forward_and_backward(loss, *leaves),
        "guide": forward_and_backward(guided, *leaves),
    }
    assert loss(exclude=fastqt.Margin(MARGIN)) < loss()  # Some cells leave.

    peaks = {name: peak_above_gradients(run, leaves) for name, run in {"ours": ours, **others}.items()}
    rounds = max(5, min(100, int(2e11 / (N * N * D))))
    median, seconds = in_turns_with(benchmark, ours, others, rounds)
    benchmark.extra_info.update(
        N=N,
        D=D,
        backend=backend,
        rounds=rounds,
        seconds=seconds,
        ratio_to_without={
            "margin": median / seconds["without"],
            "guide": seconds["guide"] / seconds["without"],
        },
        peak_above_gradients=peaks,
    )
