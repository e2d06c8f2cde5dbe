"""The error of the loss, measured in float64, is about eager PyTorch's on converged inputs.

Fused kernels lose accuracy at the end of training: once a positive is learnt, the gradient p - t is the
difference of two numbers close to 1.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import fastqt
from tests.shared import oracle
from tests.shared.tolerances import EAGER_FACTOR, HALF_ULP

pytestmark = pytest.mark.usefixtures("low_memory_in_tiles")
N, D = 96, 48


def eager(queries: torch.Tensor, candidates: torch.Tensor, T: torch.Tensor, diagonal: str) -> torch.Tensor:
    scores = queries @ candidates.T
    if diagonal == "zero":
        scores = scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), 0)
    return F.kl_div(scores.log_softmax(1), T, reduction="none").sum(1)


def converged(
    generator: torch.Generator, offsets: list[int], score: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows whose targets score about `score` and whose other candidates score about 0."""
    candidates = F.normalize(torch.randn(N, D, generator=generator), dim=1)
    for _ in range(200):  # spread the candidates out, so that the targets stand out
        gram = candidates @ candidates.T - torch.eye(N)
        candidates = F.normalize(candidates - 0.1 * gram @ candidates, dim=1)
    wanted = torch.from_numpy(oracle.window(N, N, offsets, normalize=False)).float()
    return score * (wanted @ candidates), candidates


def error(a: np.ndarray, exact: np.ndarray) -> float:
    return float(np.linalg.norm(a - exact) / np.linalg.norm(exact))


INPUTS = {
    "p > 0.999, diagonal": ([0], 20.0, "keep"),
    "p > 1 - 1e-9, diagonal": ([0], 40.0, "keep"),
    "p > 0.999, next": ([1], 20.0, "zero"),
    "converged window": ([-1, 1], 25.0, "zero"),
}


@pytest.mark.parametrize(("backend", "memory"), [("cpu", "fast"), ("cpu", "low"), ("torch", "fast")])
@pytest.mark.parametrize("name", INPUTS)
def test_error_is_at_most_eagers(name, backend, memory):
    offsets, score, diagonal = INPUTS[name]
    T = oracle.window(N, N, offsets)
    targets = fastqt.Window(offsets=offsets)
    ours, eagers = [], []
    for seed in range(5):
        queries, candidates = converged(torch.Generator().manual_seed(seed), offsets, score)
        exact = oracle.contrastive(
            queries.double().numpy(), candidates.double().numpy(), T, diagonal=diagonal
        )
        if "p >" in name:
            assert np.exp(-exact.loss).min() > (1 - 1e-9 if "1e-9" in name else 0.999)
        wanted = (exact.loss, exact.queries, exact.candidates)
        inputs = (queries.requires_grad_(), candidates.requires_grad_())

        options = {"diagonal": diagonal, "memory": memory, "backend": backend}
        rows = fastqt.contrastive_loss(*inputs, targets, reduction="none", **options)
        mean = fastqt.contrastive_loss(*inputs, targets, **options)
        results = (rows.detach(), *torch.autograd.grad(mean, inputs))
        ours.append([error(a.double().numpy(), b) for a, b in zip(results, wanted, strict=True)])

        rows = eager(*inputs, torch.from_numpy(T).float(), diagonal)
        results = (rows.detach(), *torch.autograd.grad(rows.mean(), inputs))
        eagers.append([error(a.double().numpy(), b) for a, b in zip(results, wanted, strict=True)])
    bound = EAGER_FACTOR * np.mean(eagers, axis=0) + HALF_ULP[torch.float32]
    assert (np.mean(ours, axis=0) <= bound).all(), (np.mean(ours, axis=0), np.mean(eagers, axis=0))


def of_labels(
    rows: torch.Tensor, labels: torch.Tensor, scale: float, normalize: bool, bias: torch.Tensor | None
) -> torch.Tensor:
    """The mean over rows of the mean over the other rows of their label of -log P."""
    x = F.normalize(rows, dim=1) if normalize else rows
    scores = scale * x @ x.T if bias is None else scale * x @ x.T + bias
    itself = torch.eye(len(x), dtype=torch.bool)
    log_p = scores.masked_fill(itself, -torch.inf).log_softmax(1)
    positive = (labels[:, None] == labels) & ~itself
    return -(log_p.where(positive, 0).sum(1) / positive.sum(1)).mean()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("backend", "memory"), [("cpu", "fast"), ("cpu", "low"), ("torch", "fast")])
def test_several_targets_that_are_learnt_are_exact(backend, memory, normalize, biased):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(N) // 4
    centres = F.normalize(torch.randn(N // 4, D, generator=generator), dim=1)
    # Cosines differ by the squares of the noise.
    noise = 1e-3 if normalize else 1e-5
    rows = centres[labels] + noise * torch.randn(N, D, generator=generator)
    bias = torch.randn(N // 4, generator=generator)[labels] if biased else None
    scale, leaf = 50.0, rows.requires_grad_()

    def gradient(function, dtype):
        b = None if bias is None else bias.to(dtype)
        return torch.autograd.grad(function(leaf.to(dtype), b), leaf)[0].double().numpy()

    def ours(x, b):
        places = torch.arange(N)
        positive = (labels[:, None] == labels) & (places[:, None] != places)
        targets = fastqt.Sparse((positive.double() / 3).to_sparse_csr())
        options = {} if b is None else {"bias": b}
        options |= {"scale": scale, "normalize": normalize, "memory": memory, "backend": backend}
        return fastqt.contrastive_loss(x, x, targets, diagonal="exclude", **options)

    exact = gradient(lambda x, b: of_labels(x, labels, scale, normalize, b), torch.float64)
    # Scores of float32 differ from what they round by as much as the targets' scores differ from each other.
    assert (
        error(gradient(lambda x, b: of_labels(x, labels, scale, normalize, b), torch.float32), exact) > 1e-3
    )
    assert error(gradient(ours, torch.float32), exact) < 1e-4


@pytest.mark.parametrize("score", [20.0, 60.0])
@pytest.mark.parametrize("backend", ["cpu", "torch", "reference"])
def test_a_found_pair_has_its_small_gradient(backend, score):
    """1 - P of a positive is computed from its score: as a difference of P from 1 it would be lost."""
    query = torch.tensor([[score]], requires_grad=True)
    loss = fastqt.sigmoid_loss(query, torch.ones(1, 1), fastqt.Diagonal(), diagonal="keep", backend=backend)
    (found,) = torch.autograd.grad(loss, query)
    assert float(found) == pytest.approx(-math.exp(-score), rel=1e-6)
