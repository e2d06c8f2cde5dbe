"""Losses of bfloat16 embeddings on a CPU, beside eager PyTorch and the three products in bfloat16.

The choice between products in bfloat16 and in float32 rests on `test_products`: it times both with oneDNN as
it is and held back from the instructions for bfloat16.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastqt
from benchmarks.measure.baselines import eager_contrastive_loss, loss_products, window_matrix
from benchmarks.measure.timing import beside_products, in_turns_with
from benchmarks.measure.workloads import embeddings, forward_and_backward, peak_above_gradients
from benchmarks.paths import ROOT
from fastqt.engines import cpu

SIZES = [(512, 768), (2048, 1024), (4096, 768), (8192, 768)]  # (N, D)
CASES = [
    *(("contrastive_loss", N, D, "fast") for N, D in SIZES),
    ("contrastive_loss", 8192, 768, "low"),
    ("info_nce_loss", 4096, 768, "fast"),
]
ERRORS_AT = 2048, 512
SCALE = 20.0
LEVELS = {"as it is": None, "without instructions for bfloat16": "AVX512_CORE"}  # ONEDNN_MAX_CPU_ISA


def eager_pairs(a: Tensor, b: Tensor) -> Tensor:
    scores = SCALE * F.normalize(a, dim=1) @ F.normalize(b, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(a)))


def losses(name: str, N: int, memory: str) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """fastqt's loss of two matrices, and eager PyTorch's."""
    if name == "info_nce_loss":
        return partial(fastqt.info_nce_loss, scale=SCALE, normalize=True, memory=memory), eager_pairs
    targets = window_matrix(N, 1).bfloat16()
    return partial(fastqt.contrastive_loss, memory=memory), lambda a, b: eager_contrastive_loss(a, b, targets)


@pytest.mark.parametrize(("name", "N", "D", "memory"), CASES)
def test_bfloat16(benchmark, name, N, D, memory):
    leaves = [x.detach().bfloat16().requires_grad_() for x in embeddings(N, N, D=D)]
    values = [x.detach() for x in leaves]
    loss, eager_loss = losses(name, N, memory)

    fused = forward_and_backward(lambda: loss(*leaves), *leaves)
    fused()
    fused_bytes = peak_above_gradients(fused, leaves)

    eager = forward_and_backward(lambda: eager_loss(*leaves), *leaves)
    eager_bytes = peak_above_gradients(eager, leaves)

    wide = [x.float().requires_grad_() for x in values]
    others = {
        "gemm": partial(loss_products(*leaves), *values),
        "eager": eager,
        "float32": forward_and_backward(lambda: loss(*wide), *wide),
    }

    rounds = max(3, min(60, int(2e11 / (N * N * D))))
    ours, seconds = in_turns_with(benchmark, fused, others, rounds)

    benchmark.extra_info.update(
        loss=name,
        N=N,
        D=D,
        memory=memory,
        rounds=rounds,
        computed_in=str(torch.bfloat16 if cpu.has_bfloat16_products() else torch.float32),
        **beside_products(ours, seconds),
        float32_ratio_to_gemm=seconds["float32"] / seconds["gemm"],
        peak_above_gradients=fused_bytes,
        eager_peak_above_gradients=eager_bytes,
    )


def pairs(state: str) -> list[Tensor]:
    """Two views in bfloat16: independent, or so close that their loss is nearly 0."""
    a, b = embeddings(*(ERRORS_AT[0],) * 2, D=ERRORS_AT[1])
    return [x.detach().bfloat16() for x in (a, b if state == "random" else a + 0.1 * b)]


def gradients(loss: Callable[..., Tensor], inputs: list[Tensor]) -> Tensor:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.cat([g.double() for g in torch.autograd.grad(loss(*leaves), leaves)])


@pytest.mark.parametrize("state", ["random", "converged"])
def test_bfloat16_error(benchmark, state):
    embeddings = pairs(state)
    truth = gradients(eager_pairs, [x.double() for x in embeddings])
    loss, _ = losses("info_nce_loss", len(embeddings[0]), "fast")
    ours = benchmark.pedantic(gradients, (loss, embeddings), rounds=1)
    errors = {
        name: ((gradient - truth).norm() / truth.norm()).item()
        for name, gradient in (("fastqt", ours), ("eager", gradients(eager_pairs, embeddings)))
    }
    benchmark.extra_info.update(state=state, N=ERRORS_AT[0], D=ERRORS_AT[1], gradient_errors=errors)


PRODUCTS = """
    import json, statistics, time, torch

    def seconds(dtype):
        a, b = (torch.randn(n, 768).to(dtype) for n in (1024, 2048))
        begin = time.perf_counter()
        torch.mm(a, b.T)
        return time.perf_counter() - begin

    taken = [[seconds(dtype) for dtype in (torch.float32, torch.bfloat16)] for _ in range(21)]
    print(json.dumps([statistics.median(times) for times in zip(*taken[1:])]))
"""


@pytest.mark.parametrize("level", LEVELS)
def test_products(benchmark, level):
    """One process a level, as oneDNN reads the variable once."""
    limit = LEVELS[level]
    environment = os.environ | ({} if limit is None else {"ONEDNN_MAX_CPU_ISA": limit})
    command = [sys.executable, "-c", textwrap.dedent(PRODUCTS)]
    options = {"cwd": ROOT, "env": environment, "check": True, "capture_output": True, "text": True}
    done = benchmark.pedantic(subprocess.run, (command,), options, rounds=1)
    wide, narrow = json.loads(done.stdout)
    benchmark.extra_info.update(level=level, float32_seconds=wide, bfloat16_seconds=narrow)
