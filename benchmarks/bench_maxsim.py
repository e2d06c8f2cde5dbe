"""MaxSim of a batch's queries and documents, beside plain PyTorch with the scores of all pairs of tokens.

pytest --benchmark --benchmark-json benchmarks/results/maxsim.json benchmarks/bench_maxsim.py

Queries have ColBERT's 32 tokens and documents its 180. The run is stored on its own, and `make bench` leaves
it out.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.measure.timing import in_turns_with
from benchmarks.measure.workloads import forward_and_backward, peak_above_gradients

TOKENS, LENGTH, D = 32, 180, 128
SIZES = [(32, 64), (64, 64), (64, 128), (128, 256)]  # queries, and documents with the hard negatives


def of_all_tokens(queries: Tensor, documents: Tensor) -> Tensor:
    q, d = (F.normalize(x, dim=2) for x in (queries, documents))
    scores = torch.einsum("itd,jud->ijtu", q, d).amax(3).sum(2)
    return F.cross_entropy(scores, torch.arange(len(queries)))


@pytest.mark.parametrize(("N", "M"), SIZES)
def test_maxsim(benchmark, N, M):
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(N, TOKENS, D, generator=generator).requires_grad_()
    documents = torch.randn(M, LENGTH, D, generator=generator).requires_grad_()
    leaves = queries, documents
    ours = forward_and_backward(partial(fastqt.maxsim_loss, *leaves), *leaves)
    others = {"plain": forward_and_backward(partial(of_all_tokens, *leaves), *leaves)}
    with torch.no_grad():
        assert torch.allclose(fastqt.maxsim_loss(*leaves), of_all_tokens(*leaves), rtol=1e-5)

    peaks = {name: peak_above_gradients(run, leaves) for name, run in {"ours": ours, **others}.items()}
    rounds = max(5, min(50, int(2e6 / (N * M * TOKENS))))
    median, seconds = in_turns_with(benchmark, ours, others, rounds)
    benchmark.extra_info.update(
        N=N,
        M=M,
        tokens=(TOKENS, LENGTH),
        D=D,
        rounds=rounds,
        seconds=seconds,
        times_faster=seconds["plain"] / median,
        peak_above_gradients=peaks,
    )
