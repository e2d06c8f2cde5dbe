"""The max-margin loss against three loops over its definition, in numpy and float64."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

import fastqt
from fastqt.losses import max_margin
from tests.shared import oracle
from tests.shared.tolerances import FLOAT32, FLOAT64, UNIT_ROUNDOFF, relative

N, M, D = 11, 14, 4
IDS = [0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3]
CLASSES = [3, -100, 0, 12, 13, 1, 1, 5, 4, 10, 2]
ONE_HOT = np.array([[float(column == chosen) for column in range(M)] for chosen in CLASSES])
FEW = [1, 0, *[2] * (N - 2)]
MATRIX = (np.random.default_rng(2).random((N, M)) < 0.3) * (1 - np.eye(N, M)) * 0.4

CASES = {
    "default": ({}, N, oracle.window(N, N, [-1, 1])),
    "context of 3": ({"context_size": 3}, N, oracle.window(N, N, [-3, -2, -1, 1, 2, 3])),
    "documents": ({"document_ids": torch.tensor(IDS)}, N, oracle.window(N, N, [-1, 1], document_ids=IDS)),
    "wide": ({"targets": fastqt.Window(offsets=[1, 4])}, M, oracle.window(N, M, [1, 4])),
    "classes": ({"targets": torch.tensor(CLASSES)}, M, ONE_HOT),
    "matrix": ({"targets": torch.from_numpy(MATRIX)}, M, MATRIX),
    "sparse": ({"targets": torch.from_numpy(MATRIX).to_sparse_csr()}, M, MATRIX),
    "kept": ({"targets": fastqt.Diagonal(), "diagonal": "keep"}, M, np.eye(N, M)),
    "kept window": ({"diagonal": "keep"}, N, oracle.window(N, N, [-1, 1])),
    "fewer candidates": (
        {"targets": torch.tensor([1, 0] + [2] * (N - 2))},
        4,
        np.eye(4)[[1, 0] + [2] * (N - 2)],
    ),
    "margin": ({"margin": 0.3}, N, oracle.window(N, N, [-1, 1])),
}
each_case = pytest.mark.parametrize("name", CASES)
each_chunk = pytest.mark.parametrize("chunk_scores", [1, 40, 10_000])


def inputs(candidates: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(rows, D, generator=generator, dtype=torch.float64).requires_grad_()
        for rows in (N, candidates)
    )


def by_the_book(F, G, T, margin=1.0, diagonal="exclude", row_weights=None):
    losses, dF, dG = np.zeros(len(F)), np.zeros_like(F), np.zeros_like(G)
    w = np.full(len(F), 1 / len(F)) if row_weights is None else row_weights
    for i in range(len(F)):
        for p in np.flatnonzero(T[i]):
            for j in range(len(G)):
                excess = margin - F[i] @ G[p] + F[i] @ G[j]
                if T[i, j] == 0 and (j != i or diagonal == "keep") and excess > 0:
                    losses[i] += excess
                    dF[i] += w[i] * (G[j] - G[p])
                    dG[j] += w[i] * F[i]
                    dG[p] -= w[i] * F[i]
    return losses, dF, dG


@each_case
@each_chunk
def test_values_and_gradients_are_the_books(name, chunk_scores, monkeypatch):
    monkeypatch.setattr(max_margin, "CHUNK_SCORES", chunk_scores)
    options, candidates, T = CASES[name]
    f, g = inputs(candidates)
    loss = fastqt.max_margin_loss(f, g, **options)
    given = {name: value for name, value in options.items() if name in ("margin", "diagonal")}
    losses, *gradients = by_the_book(f.detach().numpy(), g.detach().numpy(), T, **given)
    assert relative(loss, losses.mean()) <= FLOAT64
    for got, want in zip(torch.autograd.grad(loss, (f, g)), gradients, strict=True):
        assert relative(got, want) <= FLOAT64


@each_chunk
def test_reductions(chunk_scores, monkeypatch):
    monkeypatch.setattr(max_margin, "CHUNK_SCORES", chunk_scores)
    f, g = inputs(N)
    upstream = torch.randn(N, dtype=torch.float64)
    losses, *gradients = by_the_book(
        f.detach().numpy(), g.detach().numpy(), CASES["default"][2], row_weights=upstream.numpy()
    )
    rows = fastqt.max_margin_loss(f, g, reduction="none")
    assert relative(rows, losses) <= FLOAT64
    assert relative(fastqt.max_margin_loss(f, g, reduction="sum"), losses.sum()) <= FLOAT64
    for got, want in zip(torch.autograd.grad(rows, (f, g), upstream), gradients, strict=True):
        assert relative(got, want) <= FLOAT64


@pytest.mark.parametrize("normalize", [False, True])
def test_gradients_are_those_of_differences(normalize):
    assert torch.autograd.gradcheck(
        lambda f, g: fastqt.max_margin_loss(f, g, normalize=normalize, context_size=2), inputs(N)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_are_computed_in_float32(dtype):
    f, g = (x.detach().to(dtype).requires_grad_() for x in inputs(N))
    loss = fastqt.max_margin_loss(f, g)
    losses, *gradients = by_the_book(*(x.detach().double().numpy() for x in (f, g)), CASES["default"][2])
    assert loss.dtype == torch.float32
    assert relative(loss, losses.mean()) <= FLOAT32
    rounding = FLOAT32 if dtype is torch.float32 else UNIT_ROUNDOFF[dtype]  # of the result
    for got, want in zip(torch.autograd.grad(loss, (f, g)), gradients, strict=True):
        assert got.dtype == dtype
        assert relative(got, want) <= rounding
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(fastqt.max_margin_loss(f, g), loss)


def test_pairs_beyond_the_margin_cost_nothing():
    f = 10 * torch.eye(6, dtype=torch.float64)
    g = f.roll(1, 0).requires_grad_()  # the target of row i is candidate i + 1, and no other scores
    loss = fastqt.max_margin_loss(f, g, fastqt.Window(offsets=[1]))
    loss.backward()
    assert loss == 0
    assert not g.grad.any()


def test_without_targets_the_loss_is_zero_and_nan_is_seen():
    f, g = inputs(N)
    assert fastqt.max_margin_loss(f, g, torch.full((N,), -100)) == 0
    broken = f.detach().clone()
    broken[3, 1] = torch.nan
    rows = fastqt.max_margin_loss(broken, g, reduction="none")
    assert rows.isnan().nonzero().flatten().tolist() == [3]


def test_a_second_derivative_is_refused():
    f, g = inputs(N)
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(fastqt.max_margin_loss(f, g), f, create_graph=True)


@pytest.mark.slow
def test_no_matrix_of_scores():
    """At N = 8,192 one would take 256 MiB."""
    script = """
import resource, torch, fastqt
def run(N):
    f, g = ((torch.randn(N, 8) * 0.1).requires_grad_() for _ in range(2))
    fastqt.max_margin_loss(f, g).backward()
run(64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(8192)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "max"}, "reduction: want one of"),
        ({"margin": float("inf")}, "margin: want a finite number, got inf"),
        ({"targets": fastqt.Diagonal()}, "targets: Diagonal"),
        ({"targets": fastqt.smoothed(fastqt.Window())}, "targets: smoothed targets"),
        ({"targets": fastqt.smoothed(fastqt.Window()), "diagonal": "keep"}, "targets: want some candidates"),
        ({"diagonal": "zero"}, "diagonal: want one of"),
        ({"targets": fastqt.Window(), "document_ids": torch.zeros(N, dtype=torch.int64)}, "document_ids"),
        ({"context_size": N}, "context_size"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fastqt.max_margin_loss(*inputs(N), **options)
