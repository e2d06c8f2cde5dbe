"""What a guide is made of, its thresholds, and what it refuses."""

import math

import numpy as np
import pytest
import torch

import fastqt
from fastqt.exclusions.guide import PAIR_ROWS, pair_thresholds
from tests.shared import oracle
from tests.shared.tolerances import UNIT_ROUNDOFF

N, E, K = 6, 5, 3
generator = torch.Generator().manual_seed(0)
QUERIES, CANDIDATES, NEGATIVES = (torch.randn(n, E, generator=generator) for n in (N, N + 2, K))
X = torch.randn(N, 4)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("margin", "strategy"), [(0.0, "absolute"), (0.3, "absolute"), (0.3, "relative")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_thresholds_are_the_definitions(dtype, margin, strategy, normalize):
    given = QUERIES.to(dtype), CANDIDATES.to(dtype)
    guide = fastqt.Guide(*given, margin=margin, margin_strategy=strategy, normalize=normalize)
    scores = oracle.guide_scores(*(x.double().numpy() for x in given), normalize)
    wanted = oracle.guide_thresholds(scores, margin, strategy)
    found = guide.row_thresholds()
    assert found.dtype is torch.float32
    # The score and the threshold are each rounded once to float32, and so is the margin.
    assert np.abs(found.numpy() - wanted).max() <= 4 * UNIT_ROUNDOFF[torch.float32] * np.abs(scores).max()


def test_thresholds_of_many_rows_are_those_of_each():
    queries, positives = torch.randn(2, PAIR_ROWS + 3, 2)
    found = pair_thresholds(queries, positives, margin=0.1, strategy="absolute")
    last = pair_thresholds(queries[-2:], positives[-2:], margin=0.1, strategy="absolute")
    assert torch.equal(found[-2:], last)


def test_given_thresholds_are_taken():
    guide = fastqt.Guide(QUERIES, CANDIDATES, thresholds=torch.arange(6.0))
    assert guide.row_thresholds().tolist() == [*range(6)]


def test_thresholds_may_be_a_column_of_a_matrix():
    thresholds = (torch.arange(12.0) / 12).view(6, 2)[:, 1]
    losses = [
        fastqt.info_nce_loss(X, X, exclude=fastqt.Guide(QUERIES, QUERIES, thresholds=t))
        for t in (thresholds, thresholds.clone())
    ]
    assert torch.equal(*losses)


def test_it_holds_no_graph():
    guide = fastqt.Guide(QUERIES.clone().requires_grad_(), CANDIDATES.clone().requires_grad_())
    assert not guide.queries.requires_grad
    assert not guide.row_thresholds().requires_grad


MADE = {
    "queries": ({"queries": QUERIES.long()}, TypeError, "queries: want a floating-point dtype"),
    "width": ({"candidates": CANDIDATES[:, :4]}, ValueError, "candidates: want D=5 columns as queries"),
    "dtype": ({"candidates": CANDIDATES.double()}, TypeError, "candidates: want dtype torch.float32"),
    "negatives": ({"negatives": NEGATIVES[0]}, ValueError, r"negatives: want shape \(rows, D\)"),
    "margin": ({"margin": math.nan}, ValueError, "margin: want a finite number"),
    "strategy": ({"margin_strategy": "perc"}, ValueError, "margin_strategy: want one of 'absolute'"),
    "normalize": ({"normalize": 1}, TypeError, "normalize: want True or False"),
    "thresholds": ({"thresholds": torch.zeros(5)}, ValueError, r"thresholds: want shape \(6,\), got \(5,\)"),
    "integers": ({"thresholds": torch.zeros(6).long()}, TypeError, "thresholds: want a floating-point dtype"),
    "both": ({"thresholds": torch.zeros(6), "margin": 0.1}, ValueError, "margin: want 0 where thresholds"),
}


@pytest.mark.parametrize("name", MADE)
def test_it_refuses_in_words(name):
    changed, kind, message = MADE[name]
    with pytest.raises(kind, match=message):
        fastqt.Guide(**{"queries": QUERIES, "candidates": CANDIDATES, **changed})


USED = {
    "tensor": (QUERIES, {}, TypeError, "exclude: want dtype torch.bool"),
    "embeddings": ((QUERIES, CANDIDATES), {}, ValueError, "exclude: want at most one bool tensor"),
    "queries": (
        fastqt.Guide(QUERIES[:5], CANDIDATES[:6]),
        {},
        ValueError,
        "exclude: want .* the 6 queries, got 5",
    ),
    "candidates": (
        fastqt.Guide(QUERIES, CANDIDATES),
        {},
        ValueError,
        "exclude: want .* the 6 candidates, got 8",
    ),
    "negatives of the guide": (
        fastqt.Guide(QUERIES, CANDIDATES[:6], negatives=NEGATIVES),
        {},
        ValueError,
        "exclude: want negatives of loss and guide or of none, the guide has them and the loss has not",
    ),
    "negatives of the loss": (
        fastqt.Guide(QUERIES, CANDIDATES[:6]),
        {"negatives": X},
        ValueError,
        "exclude: want negatives of loss and guide or of none, the loss has them and the guide has not",
    ),
    "more queries": (
        fastqt.Guide(QUERIES, CANDIDATES[:4]),
        {"candidates": X[:4]},
        ValueError,
        "exclude: want a guide with thresholds where there are fewer candidates than queries, got M=4, N=6",
    ),
    "smoothed": (
        fastqt.Guide(QUERIES, CANDIDATES[:6]),
        {"targets": fastqt.smoothed(fastqt.Window())},
        ValueError,
        "exclude: want None with smoothed targets",
    ),
}


@pytest.mark.parametrize("name", USED)
def test_a_loss_refuses_a_guide_that_does_not_fit(name):
    guide, changed, kind, message = USED[name]
    with pytest.raises(kind, match=message):
        fastqt.contrastive_loss(**{"queries": X, "candidates": X, **changed}, exclude=guide)
