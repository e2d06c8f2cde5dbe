"""Benchmarks mean by a MiB what the package's own comparison does: the peak above inputs and results."""

import torch

from benchmarks.measure import timing, workloads
from fastqt.sentences.tools import memory
from fastqt.sentences.tools.memory import MIB


def test_the_peak_is_above_the_results(monkeypatch):
    """The growth of the process is given here: the loss and the gradients are taken away from it."""
    monkeypatch.setattr(memory, "growth_of_process", lambda function: (function(), 100 * MIB))
    N, D = 64, 16
    leaves = workloads.embeddings(N, N, D=D)
    run = workloads.forward_and_backward(lambda: (leaves[0] @ leaves[1].T).sum(), *leaves)
    assert workloads.peak_above_gradients(run, leaves) == 100 * MIB - 2 * N * D * 4

    one_mib = torch.ones(MIB // 4)
    results, peak = timing.peak_above_results(timing.Clock(torch.device("cpu")), lambda i: [one_mib.clone()])
    assert (len(results), peak) == (1, 99 * MIB)
