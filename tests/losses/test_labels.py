"""SupCon's and NT-Xent's losses equal their definitions, in value and gradients, whatever the labels."""

import numpy as np
import pytest
import torch
from label_oracle import answer, mean_weights
from loss_views import by_backend
from tolerances import FLOAT64, relative

import fastqt

LOSSES = {"supcon": fastqt.supcon_loss, "ntxent": fastqt.ntxent_loss}
by_loss = pytest.mark.parametrize("loss", LOSSES)

N = 24
LABELS = {
    "pairs": [i // 2 for i in range(N)],
    "shuffled": [(7 * i) % 5 - 2 for i in range(N)],
    "one each": list(range(N)),
    "all equal": [3] * N,
    "two halves": [i % 2 for i in range(N)],
    "of all sizes": [0] * 12 + [1] * 6 + [2] * 3 + [3] * 2 + [4],
    "some alone": [i if i % 3 else -1 for i in range(N)],
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def converged(labels: torch.Tensor, noise: float, D: int = 40) -> torch.Tensor:
    """Rows that are nearly equal where their labels are, and nearly orthogonal otherwise."""
    _, classes = labels.unique(return_inverse=True)
    return torch.eye(D, dtype=torch.float64)[classes] + noise * drawn(len(labels), D, seed=1)


def check(loss, x, labels, y=None, candidate_labels=None, *, tolerance=FLOAT64, scale=7.0, **options):
    """Compares a loss, its rows and all gradients with the oracle's."""
    itself = y is None
    inputs = [x.clone().requires_grad_(), torch.tensor(scale, dtype=torch.float64, requires_grad=True)]
    given = {}
    if not itself:
        inputs.append(y.clone().requires_grad_())
        given = {"candidates": inputs[2], "candidate_labels": candidate_labels}
    y, candidate_labels = (x, labels) if itself else (y, candidate_labels)
    arrays = [
        t.double().numpy() if t.is_floating_point() else t.numpy() for t in (x, labels, y, candidate_labels)
    ]
    normalize = options.get("normalize", True)
    means = mean_weights(loss, arrays[1], arrays[3], itself)
    drawn_weights = np.linspace(0.5, 1.5, len(x))
    for reduction, weights in (("mean", means), ("sum", np.ones(len(x))), ("none", drawn_weights)):
        wanted = answer(loss, *arrays, itself, scale, normalize, weights)
        value = LOSSES[loss](inputs[0], labels, scale=inputs[1], reduction=reduction, **given, **options)
        expected = wanted.rows if reduction == "none" else (weights * wanted.rows).sum()
        assert relative(value, expected) < tolerance
        upstream = torch.from_numpy(weights).to(value.dtype) if reduction == "none" else None
        found = torch.autograd.grad(value, inputs, upstream)
        of_rows = wanted.embeddings + wanted.candidates if itself else wanted.embeddings
        for a, b in zip(found, (of_rows, np.float64(wanted.scale), wanted.candidates), strict=False):
            # What is 0 but for rounding is compared with the scores' own size.
            assert relative(a, b) < tolerance or np.abs(b).max() < 1e-13, (reduction, a, b)


@by_backend
@by_loss
@pytest.mark.parametrize("labels", LABELS)
def test_is_the_definition(loss, labels, backend):
    check(loss, drawn(N, 6), torch.tensor(LABELS[labels]), backend=backend)
    check(loss, drawn(N, 6) / 3, torch.tensor(LABELS[labels]), backend=backend, normalize=False)


@by_backend
@by_loss
@pytest.mark.parametrize("labels", LABELS)
def test_against_other_candidates_no_row_is_left_out(loss, labels, backend):
    given, others = torch.tensor(LABELS[labels]), torch.tensor(LABELS[labels] + [1, 0, -2, 99]).flip(0)
    check(loss, drawn(N, 6), given, drawn(N + 4, 6, seed=2), others, backend=backend)
    check(loss, drawn(3, 6), given[:3], drawn(N + 4, 6, seed=2), others, backend=backend)
