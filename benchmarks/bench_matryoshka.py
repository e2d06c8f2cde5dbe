"""Matryoshka losses of float32 on a CPU: five prefixes in one loss, beside other ways to their sum.

pytest --benchmark --benchmark-json benchmarks/results/matryoshka.json benchmarks/bench_matryoshka.py

The one loss is that of the whole embeddings. A wrapper computes a loss for each prefix, which it cuts from
the embeddings and normalises, as the MatryoshkaLoss of sentence-transformers does: around ours, and around
plain PyTorch's cross-entropy of a matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.measure.baselines import loss_products
from benchmarks.measure.timing import beside_products, in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients

SIZES = [(4096, 768), (8192, 768)]  # (N, D)
DIMS = (64, 128, 256, 512, 768)
SCALE = 20.0


def wrapped(loss: Callable[[Tensor, Tensor], Tensor], queries: Tensor, candidates: Tensor) -> Tensor:
    """The sum of a loss of each prefix at norm 1."""
    prefixes = [[F.normalize(x[:, :dim], dim=1) for x in (queries, candidates)] for dim in DIMS]
    return torch.stack([loss(*pair) for pair in prefixes]).sum()


def eager(queries: Tensor, candidates: Tensor) -> Tensor:
    return F.cross_entropy(SCALE * queries @ candidates.T, torch.arange(len(queries)))


@pytest.mark.parametrize(("N", "D"), SIZES)
def test_matryoshka(benchmark, N, D):
    leaves = queries, candidates = embeddings(N, N, D=D)
    ours = partial(fastqt.info_nce_loss, scale=SCALE)
    functions = {
        "prefixes": partial(ours, *leaves, matryoshka=DIMS),
        "one": partial(ours, *leaves),
        "wrapper": partial(wrapped, ours, *leaves),
        "eager": partial(wrapped, eager, *leaves),
    }
    computed = {name: forward_and_backward(function, *leaves) for name, function in functions.items()}
    for function in computed.values():
        function()
    peaks = {name: peak_above_gradients(function, leaves) for name, function in computed.items()}

    others = {name: function for name, function in computed.items() if name != "prefixes"}
    others["gemm"] = partial(loss_products(queries, candidates), queries.detach(), candidates.detach())
    rounds = max(6, min(60, int(1e11 / (N * N * D))))
    seconds, by_name = in_turns_with(benchmark, computed["prefixes"], others, rounds)
    benchmark.extra_info.update(
        N=N,
        D=D,
        dims=DIMS,
        rounds=rounds,
        **beside_products(seconds, by_name),
        one_seconds=by_name["one"],
        wrapper_seconds=by_name["wrapper"],
        peaks_above_gradients=peaks,
    )
