"""The error of gradients that travel in bfloat16, or that ranks have rounded to it, beside PyTorch's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fastqt
from fastqt import engines
from fastqt.distributed import collectives
from fastqt.problem import Problem
from fastqt.targets import Window
from tests.shared.sharded_precision import (
    KINDS,
    SCALE,
    N,
    eager,
    embeddings,
    error,
    errors,
    errors_of_a_ring_of_kernels,
    errors_of_kernels_with_masks,
    errors_without_float64,
)
from tests.shared.tolerances import EAGER_FACTOR

RETURNS = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("return_dtype", RETURNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [*(pytest.param(P, marks=pytest.mark.slow) for P in (2, 8)), 64])
def test_parts_of_many_ranks(kind, size, dtype, return_dtype, monkeypatch):
    """The parts of all ranks are computed here, in `dtype`; what each receives is added as over a group."""
    a, b = embeddings(kind)
    truth = eager(a, b, both=False, dtype=torch.float64)
    n, parts = N // size, []
    for first in range(0, N, n):
        queries, candidates = a[first : first + n].to(dtype), b.clone().to(dtype).requires_grad_()
        targets = torch.arange(first, first + n)
        options = {"scale": SCALE, "normalize": True, "diagonal": "keep", "reduction": "sum"}
        fastqt.contrastive_loss(queries, candidates, targets, **options).backward()
        parts.append(candidates.grad / N)

    def all_to_all(received, sent, group):
        rank = group.rank
        rows = [part.to(sent.dtype)[rank * n : (rank + 1) * n] for part in parts]
        received.copy_(torch.cat(rows))

    monkeypatch.setattr(collectives.dist, "all_to_all_single", all_to_all)
    summed = []
    for rank in range(size):
        group = SimpleNamespace(rank=rank, size=size, return_dtype=return_dtype, check="first")
        group.process_group = group
        summed.append(collectives.sum_rows(parts[rank], (n,) * size, group, torch.bfloat16))
    others = error(eager(a, b, both=False, dtype=torch.bfloat16), truth)
    assert error(torch.cat(summed), truth) <= EAGER_FACTOR * others
    # Of what has travelled, the sum is rounded once, at its end, and not at every hop.
    exact = sum(part.to(return_dtype).double() for part in parts)
    assert error(torch.cat(summed), exact) <= 1.01 * error(exact.to(torch.bfloat16), exact)


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_real_ranks(ranks, size):
    for found in ranks(size).run(errors, list(RETURNS)):
        for case, ours, others in found:
            assert ours <= EAGER_FACTOR * others, case


FEW_ROUNDINGS = 5e-6  # of float32, in sums of some dozen terms
# A ring's target has 1 - P from the whole row's logsumexp: of a number near 20, with a loss near 1e-4.
OF_A_RING = 5e-3


def test_ranks_without_float64(ranks):
    for found in ranks(2).run(errors_without_float64):
        for case, most in found:
            assert most < (OF_A_RING if case == "info_nce_loss ring converged" else FEW_ROUNDINGS), case


def test_a_ring_of_softmaxes_takes_an_engine_that_knows_whole_rows(ranks):
    for found in ranks(2).run(errors_of_a_ring_of_kernels):
        assert max(found) < FEW_ROUNDINGS


@pytest.mark.slow
def test_kernels_with_masks_over_ranks(ranks):
    for found in ranks(2).run(errors_of_kernels_with_masks):
        for case, most in found:
            assert most < FEW_ROUNDINGS, case


def test_engines_say_whether_they_take_columns():
    x = torch.zeros(2, 2)
    p = Problem(x, x, None, None, 1.0, Window().rows(2, 2, x.device), "keep", None, None, None)
    for engine in engines.ENGINES.values():
        assert engine.takes_columns == hasattr(engine.of_kind(p), "backward_of_columns"), engine.name
