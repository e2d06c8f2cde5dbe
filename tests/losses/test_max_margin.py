"""The max-margin loss against three loops over its definition, in numpy and float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

import fastqt
from fastqt.losses import max_margin
from tests.shared import oracle
from tests.shared.tolerances import FLOAT64, relative

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
    monkeypatch.setattr(max_margin.MaxMarginProblem, "cpu_scores_at_once", chunk_scores)
    options, candidates, T = CASES[name]
    f, g = inputs(candidates)
    loss = fastqt.max_margin_loss(f, g, **options)
    given = {name: value for name, value in options.items() if name in ("margin", "diagonal")}
    losses, *gradients = by_the_book(f.detach().numpy(), g.detach().numpy(), T, **given)
    assert relative(loss, losses.mean()) <= FLOAT64
    for got, want in zip(torch.autograd.grad(loss, (f, g)), gradients, strict=True):
        assert relative(got, want) <= FLOAT64


def test_without_targets_the_loss_is_zero_and_nan_is_seen():
    f, g = inputs(N)
    assert fastqt.max_margin_loss(f, g, torch.full((N,), -100)) == 0
    broken = f.detach().clone()
    broken[3, 1] = torch.nan
    rows = fastqt.max_margin_loss(broken, g, reduction="none")
    assert rows.isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": fastqt.Diagonal()}, "targets: Diagonal"),
        ({"targets": fastqt.smoothed(fastqt.Window())}, "targets: smoothed targets"),
        ({"targets": fastqt.smoothed(fastqt.Window()), "diagonal": "keep"}, "targets: want some candidates"),
        ({"targets": fastqt.Window(), "document_ids": torch.zeros(N, dtype=torch.int64)}, "document_ids"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        fastqt.max_margin_loss(*inputs(N), **options)
