"""Every figure against its definition, scripts of others, and sorts of equal scores in every order.

Equal scores count as the mean over all orders of them, in every figure.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from sklearn.linear_model import LogisticRegression

from fastqt.sentences import metrics
from fastqt.sentences.evaluation import alignment, retrieval
from fastqt.sentences.evaluation.classification import accuracy
from fastqt.sentences.evaluation.retrieval import LinearMaps
from fastqt.sentences.evaluation.similarity import correlate, cosines, floor_split, relatedness
from fastqt.sentences.metrics import context_accuracy, ranking_figures, uniformity, view_figures
from tests.shared.tolerances import FLOAT32, FLOAT64

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Rows of norm 2 or 0, whose products are exact in all dtypes and often equal.
LATTICE = np.array([[2, 0, 0, 0], [0, 2, 0, 0], [0, 0, -2, 0], [1, 1, 1, 1], [1, -1, 1, -1], [0, 0, 0, 0]])


def orders(scores):
    """All orders of items that sort by score: among equal scores the one first that a permutation has first.

    Each permutation of all items is taken, so each order of equal ones comes equally often.
    """
    for priority in itertools.permutations(range(len(scores))):
        yield sorted(range(len(scores)), key=lambda item: (-scores[item], priority[item]))


def firsts_of(scores):
    """By row, the item that comes first in each order."""
    return [np.array([order[0] for order in orders(row)]) for row in scores.tolist()]


def ranks(scores, right):
    """The rank of the first right item in each order."""
    return [1 + min(order.index(item) for item in right) for order in orders(list(scores))]


def lattice(generator, rows):
    return LATTICE[generator.integers(len(LATTICE), size=rows)].astype(float)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_metrics_of_trainings_with_equal_scores(seed, dtype):
    generator = np.random.default_rng(seed)
    q, c, *more = (lattice(generator, 3 if name else 5) for name in (0, 0, 1))
    scores = q @ c.T
    np.fill_diagonal(scores, 0)
    firsts = firsts_of(scores)
    forward, backward = (sum(np.mean(each == i + d) for i, each in enumerate(firsts)) / 4 for d in (1, -1))
    accuracies = context_accuracy(torch.tensor(q, dtype=dtype), torch.tensor(c, dtype=dtype))
    assert accuracies == pytest.approx((forward, backward), rel=FLOAT64)

    q, documents = q[:3], [c[:3], *more]
    scores = (q / 2) @ (np.concatenate(documents) / 2).T
    each = np.array([ranks(row, [i]) for i, row in enumerate(scores)])
    figures = ranking_figures(torch.tensor(q, dtype=dtype), [torch.tensor(d, dtype=dtype) for d in documents])
    assert figures["accuracy"] == pytest.approx((each == 1).mean(), rel=FLOAT64)
    assert figures["mrr"] == pytest.approx((1 / each).mean(), rel=FLOAT64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("N", "D"), [(7, 77), (300, 768)])
def test_collapsed_vectors_reach_what_chance_does(N, D, dtype):
    """Though products of equal rows differ in their last bits."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, D, generator=generator).to(dtype).expand(N, D)
    figures = ranking_figures(x, [x, 2 * x])
    assert figures["accuracy"] == pytest.approx(figures["chance"])
    assert figures["mrr"] == pytest.approx(sum(1 / rank for rank in range(1, 2 * N + 1)) / (2 * N))
    # A sentence's score with itself is 0, below those with the N - 1 others.
    assert context_accuracy(x, x) == pytest.approx((1 / (N - 1), 1 / (N - 1)))


def test_what_is_not_a_number_comes_last():
    x = torch.full((5, 3), math.nan)
    assert ranking_figures(x, [x]) == pytest.approx({"accuracy": 0, "mrr": 1 / 5, "chance": 1 / 5})
    assert context_accuracy(x, x) == (0, 0)


@pytest.mark.parametrize(
    ("scores", "accuracy"),
    [
        ([-1.0, 9.0, 5.0], (1.0, 0.5)),  # row 1 would choose itself
        ([-1.0, -2.0, -3.0], (0.0, 0.0)),  # and here the 0 in its own place is above both neighbours
    ],
)
def test_the_own_score_counts_as_zero(scores, accuracy):
    assert context_accuracy(torch.ones(3, 1), torch.tensor(scores)[:, None]) == accuracy
    assert context_accuracy(torch.ones(1, 2), torch.ones(1, 2)) == (0, 0)
    queries = torch.eye(metrics.ROWS + 44)  # a chain, which is found across blocks of rows
    assert context_accuracy(queries, queries.roll(1, 1)) == (0, 1)
    assert context_accuracy(queries, queries.roll(-1, 1)) == (1, 0)


@pytest.mark.parametrize("columns", [1, 3])
def test_ranks_are_those_of_the_whole_score_matrix(columns):
    N = metrics.ROWS + 44
    q, *documents = np.random.default_rng(columns).normal(size=(1 + columns, N, 4))
    documents[0] = q + documents[0]
    scores = unit(q) @ np.concatenate([unit(x) for x in documents]).T
    each = np.array([1 + sum(row > row[i]) for i, row in enumerate(scores)])
    figures = ranking_figures(torch.from_numpy(q), [torch.from_numpy(x) for x in documents])
    wanted = {"accuracy": (each == 1).mean(), "mrr": (1 / each).mean(), "chance": 1 / (columns * N)}
    assert figures == pytest.approx(wanted)


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_uniformity_is_its_definition(t):
    N = metrics.ROWS + 30
    x = unit(np.random.default_rng(0).normal(size=(N, 6)))
    x[3] = x[11]  # this pair at distance 0 counts; a row with itself does not
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
    mixable = unit(z2) if mixes_unit_rows else z2
    mixed = unit(np.stack([0.3 * mixable[i] + 0.7 * mixable[partners[i]] for i in (0, 1, 3)]))
    wanted = (unit(z1)[[0, 1, 3]] * mixed).sum(axis=1).mean()
    views, options = [torch.from_numpy(z) for z in (z1, z2)], {"mix": 0.3, "mixes_unit_rows": mixes_unit_rows}
    figures = view_figures(*views, partners=torch.tensor(partners), **options)
    assert figures["mixed_cosine"] == pytest.approx(wanted, rel=FLOAT64)
    assert "mixed_cosine" not in view_figures(*views, partners=torch.full((5,), 5), **options)


def test_figures_of_views_are_means_over_pairs():
    z1, z2 = np.random.default_rng(1).normal(size=(2, 9, 5))
    a, b = unit(z1), unit(z2)
    mixed = unit(np.stack([0.3 * b[i] + 0.7 * b[(i + 1) % 9] for i in range(9)]))
    wanted = {
        "positive_cosine": np.mean([a[i] @ b[i] for i in range(9)]),
        "negative_cosine": np.mean([a[i] @ b[j] for i in range(9) for j in range(9) if i != j]),
        "mixed_cosine": np.mean([a[i] @ mixed[i] for i in range(9)]),
        "alignment": np.mean([((a[i] - b[i]) ** 2).sum() for i in range(9)]),
        "uniformity": uniformity(torch.from_numpy(a)),
    }
    figures = view_figures(torch.from_numpy(z1), torch.from_numpy(z2), mix=0.3)
    assert figures == pytest.approx(wanted, rel=FLOAT64)
    assert alignment(z1, z2) == pytest.approx(wanted["alignment"], rel=FLOAT32)
    assert alignment(z1, 3 * z1) == pytest.approx(0, abs=FLOAT64)


@given(arrays(np.float64, st.integers(1, 20), elements=st.floats(1, 5)))
def test_a_floor_split_is_a_distribution_whose_mean_is_the_score(scores):
    shares = floor_split(scores)
    assert shares.shape == (len(scores), 5)
    assert (shares >= 0).all()
    assert ((shares > 0).sum(axis=1) <= 2).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=FLOAT64)
    np.testing.assert_allclose(shares @ [1, 2, 3, 4, 5], scores, rtol=FLOAT64)


@pytest.mark.parametrize("wrong", [0.9, 5.1, math.nan])
def test_a_floor_split_of_other_scores_is_refused(wrong):
    with pytest.raises(ValueError, match="scores: want them from 1 to 5, got "):
        floor_split(np.array([2.0, wrong]))


def test_cosines_of_zeros_and_those_that_only_rounding_separates():
    u, v = np.array([[3.0, 4.0], [0, 0], [1, 0]]), np.array([[6.0, 8.0], [1, 1], [-2, 0]])
    np.testing.assert_allclose(cosines(u, v), [1, 0, -1])
    words = np.random.default_rng(0).standard_normal((100, 7, 20)).astype(np.float32)
    assert set(cosines(words.mean(axis=1), words[:, ::-1].mean(axis=1))) == {1}


def test_correlations_follow_their_definitions():
    generator = np.random.default_rng(0)
    x = generator.standard_normal(50)
    y = np.round(x + generator.standard_normal(50))  # with ties
    wanted = np.corrcoef(x, y)[0, 1], np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1]
    assert correlate(x, y) == pytest.approx(wanted, rel=FLOAT64)
    assert np.isnan(correlate(np.ones(50), y)).all()


def test_relatedness_agrees_with_a_regression_on_weighted_rows():
    generator = np.random.default_rng(0)
    u, v = generator.standard_normal((2, 300, 6))
    y = np.clip(5 - np.abs(u - v).mean(axis=1) * 1.5 + 0.3 * generator.standard_normal(300), 1, 5)
    parts = [(u[rows], v[rows], y[rows]) for rows in (slice(200), slice(200, 240), slice(240, 300))]
    result = relatedness(*parts, grid=(0.5, 8.0))
    x = np.concatenate([np.abs(u - v), u * v], axis=1)
    predictions = {}
    for C in (0.5, 8.0):
        shares = np.array([np.interp(np.arange(1, 6), [s - 1, s, s + 1], [0, 1, 0]) for s in y[:200]])
        oracle = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-9)
        oracle.fit(np.repeat(x[:200], 5, axis=0), np.tile(range(5), 200), shares.ravel())
        predictions[C] = oracle.predict_proba(x[200:]) @ np.arange(1, 6)
    on_dev = {C: np.corrcoef(values[:40], y[200:240])[0, 1] for C, values in predictions.items()}
    assert {result.C} == {max(on_dev, key=on_dev.get)}
    assert result.dev_pearson == pytest.approx(on_dev[result.C], abs=1e-3)
    wanted = predictions[result.C][40:]
    np.testing.assert_allclose(result.predictions, wanted, atol=0.01)
    assert result.mse == pytest.approx(((wanted - y[240:]) ** 2).mean(), abs=0.01)
    assert result.pearson == pytest.approx(np.corrcoef(wanted, y[240:])[0, 1], abs=1e-3)
    assert result.pearson > 0.5


@pytest.mark.parametrize("seed", range(6))
def test_retrieval_of_images_and_captions(seed, monkeypatch):
    monkeypatch.setattr(retrieval, "BLOCK_ROWS", 2)
    generator = np.random.default_rng(seed)
    images, captions = lattice(generator, 3), lattice(generator, 5)
    owners = np.array([0, 1, 2, *generator.integers(3, size=2)])
    maps = LinearMaps(4, 4, 4)
    for side in (maps.image, maps.caption):
        torch.nn.init.eye_(side.weight)
        torch.nn.init.zeros_(side.bias)

    scores = (images / 2) @ (captions / 2).T
    of_images = [ranks(row, np.flatnonzero(owners == image)) for image, row in enumerate(scores)]
    of_captions = [ranks(row, [owner]) for owner, row in zip(owners, scores.T, strict=True)]
    for reached, each in zip(maps.retrieve(images, captions, owners), (of_images, of_captions), strict=True):
        pooled = np.concatenate(each)
        shares = [(pooled <= limit).mean() for limit in (1, 5, 10)]
        assert reached == pytest.approx((*shares, np.median(pooled)), rel=FLOAT64)


def test_equal_images_and_captions_are_found_by_chance():
    """Also where they are equal but for rounding, and where the maps have diverged."""
    owners = np.array([0, 1, 2, 3, 0, 0])
    wanted = retrieval.chance(owners, 4)
    torch.manual_seed(0)
    for maps, fill in ((LinearMaps(3, 5, 77), 0.3), (LinearMaps(3, 5, 7), 1e38)):
        reached = maps.retrieve(np.full((4, 3), fill), np.full((6, 5), fill), owners)
        assert np.array(reached) == pytest.approx(np.array(wanted))
    assert wanted[1] == (1 / 4, 1, 1, 2.5)
    ranks_of_two, one = retrieval._Ranks(2), torch.ones(())
    scores = torch.stack([one, torch.nextafter(one, 2 * one)])  # the wrong one is larger by its last bit
    ranks_of_two.add(scores[None], torch.tensor([[True, False]]))
    assert ranks_of_two.figures()[0] == 0.5


def test_accuracies_of_classifiers_with_equal_scores():
    scores = np.log([[0.4, 0.4, 0.2], [0.2, 0.4, 0.4], [1 / 3, 1 / 3, 1 / 3], [0.1, 0.1, 0.8]])
    labels = np.array([0, 0, 2, 2])
    wanted = np.mean([np.mean(each == label) for each, label in zip(firsts_of(scores), labels, strict=True)])
    assert accuracy(scores, labels) == pytest.approx(wanted, rel=FLOAT64)
