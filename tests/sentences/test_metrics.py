"""Accuracy, uniformity and the figures of views against their definitions in numpy."""

import numpy as np
import pytest
import torch

from fastqt.sentences import metrics
from fastqt.sentences.metrics import context_accuracy, ranking_figures, uniformity, view_figures
from tests.shared.tolerances import FLOAT64


@pytest.mark.parametrize("size", [1, 2, 7, 300])
def test_accuracy_is_that_of_the_whole_score_matrix(size):
    generator = torch.Generator().manual_seed(size)
    queries = torch.randn(size, 4, generator=generator, dtype=torch.float64)
    # Candidates near their neighbours' queries, so that there is something to find.
    candidates = queries.roll(1, 0) + 0.5 * torch.randn(size, 4, generator=generator, dtype=torch.float64)
    scores = queries.numpy() @ candidates.numpy().T
    np.fill_diagonal(scores, 0)
    best = scores.argmax(axis=1)
    forward = sum(best[i] == i + 1 for i in range(size - 1)) / max(size - 1, 1)
    backward = sum(best[i] == i - 1 for i in range(1, size)) / max(size - 1, 1)
    assert context_accuracy(queries, candidates) == (forward, backward)
    assert size < 7 or forward + backward > 0


@pytest.mark.parametrize("columns", [1, 3])
def test_ranks_are_those_of_the_whole_score_matrix(columns):
    N = metrics.ROWS + 44
    q, *documents = np.random.default_rng(columns).normal(size=(1 + columns, N, 4))
    documents[0] = q + documents[0]
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (q, *documents)]
    cosines = unit[0] @ np.concatenate(unit[1:]).T
    ranks = [1 + sum(row > row[i]) for i, row in enumerate(cosines)]
    figures = ranking_figures(torch.from_numpy(q), [torch.from_numpy(x) for x in documents])
    assert figures["accuracy"] == pytest.approx(np.mean([rank == 1 for rank in ranks]))
    assert figures["mrr"] == pytest.approx(np.mean([1 / rank for rank in ranks]))
    assert figures["chance"] == 1 / (columns * N)


def test_a_chain_is_found():
    N = metrics.ROWS + 44
    queries = torch.eye(N)
    assert context_accuracy(queries, queries.roll(1, 1)) == (0, 1)
    assert context_accuracy(queries, queries.roll(-1, 1)) == (1, 0)


@pytest.mark.parametrize(
    ("scores", "accuracy"),
    [
        ([-1.0, 9.0, 5.0], (1.0, 0.5)),  # row 1 would choose itself
        ([-1.0, -2.0, -3.0], (0.0, 0.0)),  # and here the 0 in its own place is above both neighbours
    ],
)
def test_the_own_score_counts_as_zero(scores, accuracy):
    queries, candidates = torch.ones(3, 1), torch.tensor(scores)[:, None]
    assert context_accuracy(queries, candidates) == accuracy


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_uniformity_is_its_definition(t):
    N = metrics.ROWS + 30
    x = np.random.default_rng(0).normal(size=(N, 6))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    pairs = [np.exp(-t * ((x[i] - x[j]) ** 2).sum()) for i in range(N) for j in range(i)]
    assert uniformity(torch.from_numpy(x), t) == pytest.approx(np.log(np.mean(pairs)), rel=FLOAT64)
    assert uniformity(torch.from_numpy(x[:1]), t) == 0
    distances = [((x[i] - x[j]) ** 2).sum() for i in range(9) for j in range(i)]  # no exponential underflows
    wanted = -1e4 * min(distances) - np.log(len(distances))
    assert uniformity(torch.from_numpy(x[:9]), 1e4) == pytest.approx(wanted)


@pytest.mark.parametrize("mixes_unit_rows", [True, False])
def test_mixtures_are_of_the_given_partners_that_are_here(mixes_unit_rows):
    z1, z2 = np.random.default_rng(2).normal(size=(2, 5, 4)) * [[[1.0], [9.0], [0.1], [3.0], [1.0]]]
    partners = [3, 0, 7, 2, -1]  # those of rows 2 and 4 are elsewhere
    mixable = z2 / np.linalg.norm(z2, axis=1, keepdims=True) if mixes_unit_rows else z2
    cosines = []
    for i in (0, 1, 3):
        mixed = 0.3 * mixable[i] + 0.7 * mixable[partners[i]]
        cosines.append(z1[i] @ mixed / np.linalg.norm(z1[i]) / np.linalg.norm(mixed))
    views, options = [torch.from_numpy(z) for z in (z1, z2)], {"mix": 0.3, "mixes_unit_rows": mixes_unit_rows}
    figures = view_figures(*views, partners=torch.tensor(partners), **options)
    assert figures["mixed_cosine"] == pytest.approx(np.mean(cosines), rel=FLOAT64)
    assert "mixed_cosine" not in view_figures(*views, partners=torch.full((5,), 5), **options)


def test_figures_of_views_are_means_over_pairs():
    z1, z2 = np.random.default_rng(1).normal(size=(2, 9, 5))
    a, b = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in (z1, z2))
    mixed = np.stack([0.3 * b[i] + 0.7 * b[(i + 1) % 9] for i in range(9)])
    mixed /= np.linalg.norm(mixed, axis=1, keepdims=True)
    figures = view_figures(torch.from_numpy(z1), torch.from_numpy(z2), mix=0.3)
    assert figures == pytest.approx(
        {
            "positive_cosine": np.mean([a[i] @ b[i] for i in range(9)]),
            "negative_cosine": np.mean([a[i] @ b[j] for i in range(9) for j in range(9) if i != j]),
            "mixed_cosine": np.mean([a[i] @ mixed[i] for i in range(9)]),
            "alignment": np.mean([((a[i] - b[i]) ** 2).sum() for i in range(9)]),
            "uniformity": uniformity(torch.from_numpy(a)),
        },
        rel=FLOAT64,
    )
