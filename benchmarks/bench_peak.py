"""The loss as a share of what a CPU's multipliers can do, beside eager PyTorch and matrix products alone.

pytest --benchmark --benchmark-json benchmarks/results/peak.json benchmarks/bench_peak.py

Everything has the same 6 N M D operations. Each function takes steps in a row, and fastqt also single steps
after those of the others, whose matrices are in the caches then. The run is stored on its own, and only of a
quiet machine: shares that are a few per cent apart say nothing otherwise.
"""

from __future__ import annotations

import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fastqt
from benchmarks.measure.baselines import eager_contrastive_loss, loss_products, window_matrix
from benchmarks.measure.timing import in_turns_with, steps_in_a_row
from benchmarks.measure.workloads import embeddings, forward_and_backward
from fastqt.engines import ops
from tests.csrc import building

SIZES = [(400, 1000), (512, 768), (1024, 768), (2048, 1024), (4096, 768), (8192, 768)]  # (N, D)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def program() -> Path:
    """The program that measures the multipliers."""
    if building.compiler() is None:
        pytest.skip("no C++ compiler")
    flags = ("-O2", "-std=c++20", "-pthread", "-Icsrc")
    headers = ("csrc/cpu/tiles.h",)
    return building.build({"benchmarks/peak.cpp": flags}, headers=headers, link=("-pthread",))


def peak_of(program: Path, dtype: str) -> float:
    """Operations a second of a dtype, on as many threads as torch has; 0 without instructions for it."""
    printed = subprocess.run(
        [program, str(torch.get_num_threads())], capture_output=True, text=True, check=True
    )
    return 1e9 * float(printed.stdout.split()[list(DTYPES).index(dtype)])


def own_products(queries: Tensor, candidates: Tensor) -> dict[str, partial[None]]:
    """The three products by fastqt's micro-kernels, where it has such for this processor."""
    levels = (0,) * 4 if ops.native_error is not None else torch.ops.fastqt.product_levels()
    level = levels[3] if queries.dtype is torch.bfloat16 else levels[2]
    if level == 0:
        return {}
    scores = queries.new_empty(len(queries), len(candidates))
    outs = torch.empty_like(queries), torch.empty_like(candidates)

    def run() -> None:
        multiply = torch.ops.fastqt.own_product_
        multiply(scores, queries, candidates.t(), 1.0, False, level)
        multiply(outs[0], scores, candidates, 1.0, False, level)
        multiply(outs[1], scores.t(), queries, 1.0, False, level)

    return {"own": partial(run)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D"), SIZES)
def test_peak(benchmark, N, D, dtype, program):
    before = peak_of(program, dtype)
    if before == 0:
        pytest.skip(f"this processor has no instructions for {dtype}")
    leaves = [x.detach().to(DTYPES[dtype]).requires_grad_() for x in embeddings(N, N, D=D)]
    values = [x.detach() for x in leaves]
    targets = window_matrix(N, 1).to(DTYPES[dtype])
    ours = forward_and_backward(lambda: fastqt.contrastive_loss(*leaves), *leaves)
    others = {
        "torch": partial(loss_products(*values), *values),
        "eager": forward_and_backward(lambda: eager_contrastive_loss(*leaves, targets), *leaves),
        **own_products(*values),
    }
    rounds = max(5, min(60, int(2e11 / (N * N * D))))
    after_others, others_seconds = in_turns_with(benchmark, ours, others, rounds)
    seconds = steps_in_a_row({"fastqt": ours, **others}, max(1, int(2e9 / (N * N * D))), rounds)

    # The clock of a processor varies with the load of others: the peak is the better one around the run.
    peak = max(before, peak_of(program, dtype))
    operations = 6 * N * N * D
    benchmark.extra_info.update(
        N=N,
        D=D,
        dtype=dtype,
        peak=peak,
        step_seconds=seconds["fastqt"],
        shares={name: operations / each / peak for name, each in seconds.items()},
        times_faster_than_eager=seconds["eager"] / seconds["fastqt"],
        share_after_others=operations / after_others / peak,
        times_faster_after_others=others_seconds["eager"] / after_others,
    )
