"""Correlations, aggregates, floor split, alignment and uniformity, by hand and by direct formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats
from sklearn.linear_model import LogisticRegression

from fastqt.sentences import metrics
from fastqt.sentences.evaluation import (
    alignment,
    correlate,
    correlate_subsets,
    cosines,
    floor_split,
    relatedness,
    uniformity,
)
from tests.shared.tolerances import FLOAT32, FLOAT64


@given(arrays(np.float64, st.integers(1, 20), elements=st.floats(1, 5)))
def test_a_floor_split_is_a_distribution_whose_mean_is_the_score(scores):
    shares = floor_split(scores)
    assert shares.shape == (len(scores), 5)
    assert (shares >= 0).all()
    assert ((shares > 0).sum(axis=1) <= 2).all()
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=FLOAT64)
    np.testing.assert_allclose(shares @ [1, 2, 3, 4, 5], scores, rtol=FLOAT64)


def test_a_floor_split_by_hand():
    np.testing.assert_allclose(floor_split(np.array([1.0, 3.6])), [[1, 0, 0, 0, 0], [0, 0, 0.4, 0.6, 0]])
    for wrong in (0.9, 5.1, math.nan):
        with pytest.raises(ValueError, match="scores: want them from 1 to 5, got "):
            floor_split(np.array([2.0, wrong]))


def test_cosines_including_those_of_zero_vectors():
    u, v = np.array([[3.0, 4.0], [0, 0], [1, 0]]), np.array([[6.0, 8.0], [1, 1], [-2, 0]])
    np.testing.assert_allclose(cosines(u, v), [1, 0, -1])


def test_rounding_errors_do_not_separate_equal_cosines():
    words = np.random.default_rng(0).standard_normal((100, 7, 20)).astype(np.float32)
    assert set(cosines(words.mean(axis=1), words[:, ::-1].mean(axis=1))) == {1}


def test_correlations_follow_their_definition():
    generator = np.random.default_rng(0)
    x = generator.standard_normal(50)
    y = np.round(x + generator.standard_normal(50))  # with ties
    pearson, spearman = correlate(x, y)
    assert pearson == pytest.approx(np.corrcoef(x, y)[0, 1], rel=FLOAT64)
    ranks = [stats.rankdata(values) for values in (x, y)]
    assert spearman == pytest.approx(np.corrcoef(*ranks)[0, 1], rel=FLOAT64)
    assert np.isnan(correlate(np.ones(50), y)).all()


def test_aggregates_by_hand():
    # The correlation is 1 within a and b, and −1 within c. The offsets of b make that of all pairs negative.
    scores = np.array([0.1, 0.2, 0.3, 5.1, 5.2, 5.3, 0.4, 0.3])
    gold = np.array([3.0, 4.0, 5.0, 0.0, 1.0, 2.0, 1.0, 2.0])
    subset = np.array(["a", "a", "a", "b", "b", "b", "c", "c"])
    found = correlate_subsets(scores, gold, subset)
    assert found.pairs == {"a": 3, "b": 3, "c": 2}
    assert [found.subsets[name].pearson for name in "abc"] == pytest.approx([1, 1, -1])
    assert found.mean == pytest.approx((1 / 3, 1 / 3))
    assert found.wmean == pytest.approx(((3 + 3 - 2) / 8,) * 2)
    assert found.all.pearson == pytest.approx(np.corrcoef(scores, gold)[0, 1])
    assert found.all.pearson < 0


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


@pytest.mark.parametrize("t", [1.0, 2.0])
def test_alignment_and_uniformity_follow_their_formulas(t, monkeypatch):
    monkeypatch.setattr(metrics, "ROWS", 7)
    vectors = np.random.default_rng(0).standard_normal((20, 5)).astype(np.float32)
    vectors[3] = vectors[11]  # this pair at distance 0 counts; a row with itself does not
    unit = [[float(x) / math.sqrt(sum(float(y) ** 2 for y in row)) for x in row] for row in vectors]
    kernels = [
        math.exp(-t * sum((a - b) ** 2 for a, b in zip(unit[i], unit[j], strict=True)))
        for i in range(20)
        for j in range(20)
        if i != j
    ]
    assert uniformity(vectors, t) == pytest.approx(math.log(sum(kernels) / len(kernels)), rel=FLOAT32)
    distances = [sum((a - b) ** 2 for a, b in zip(unit[i], unit[i + 10], strict=True)) for i in range(10)]
    assert alignment(vectors[:10], vectors[10:]) == pytest.approx(sum(distances) / 10, rel=FLOAT32)
    assert alignment(vectors, 3 * vectors) == pytest.approx(0, abs=FLOAT64)
