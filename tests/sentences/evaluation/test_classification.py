"""Logistic regressions, the choice of C and few shots, against scikit-learn and formulas."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from fastqt.sentences.evaluation import classification as module
from fastqt.sentences.evaluation.classification import (
    accuracy,
    cross_validated,
    few_shot,
    held_out_validated,
    limited_data,
    nested_cross_validation,
    split,
)
from fastqt.sentences.evaluation.logistic import fit, one_hot
from tests.shared.tolerances import FITTED

GRID = (0.25, 4.0, 64.0)


def problem(n, d, classes, seed=0):
    """Random features with a common mean and unequal variances, like averages of word vectors; noisy classes.

    Returns:
        Features (n, d), class numbers (n,), and three random training sets (3, n) bool.
    """
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((n, d)) * np.exp(-3 * np.arange(d) / d)
    features += generator.standard_normal(d)
    scores = 3 * (features - features.mean(axis=0)) @ generator.standard_normal((d, classes)) / np.sqrt(d)
    labels = (scores + generator.gumbel(size=scores.shape)).argmax(axis=1)
    return features, labels, generator.random((3, n)) < 0.8


def by_scikit_learn(C, tol=1e-9):
    return LogisticRegression(C=C, solver="newton-cholesky", tol=tol)


def search(folds, seed=0):
    """scikit-learn's search for C, the oracle."""
    shuffled = StratifiedKFold(folds, shuffle=True, random_state=seed)
    return GridSearchCV(by_scikit_learn(1.0, 1e-8), {"C": GRID}, cv=shuffled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "d", "classes"), [(400, 30, 2), (400, 20, 4), (60, 90, 2), (60, 90, 3)])
def test_many_regressions_at_once_are_those_of_scikit_learn(n, d, classes, dtype):
    features, labels, rows = problem(n, d, classes)
    data, grid = torch.from_numpy(features).to(dtype), (2.0**-2, 1.0, 16.0, 256.0)
    for C, classifiers in zip(grid, fit(data, one_hot(labels, classes), rows, grid), strict=True):
        found = classifiers.log_probs(data).exp().double().numpy()
        for own, within in zip(found, rows, strict=True):
            oracle = by_scikit_learn(C).fit(features[within], labels[within])
            np.testing.assert_allclose(own, oracle.predict_proba(features), atol=FITTED[dtype])


def test_soft_targets_equal_weighted_copies_of_a_row():
    features, _, _ = problem(200, 10, 3)
    shares = np.random.default_rng(1).dirichlet(np.ones(3), size=200)
    data = torch.from_numpy(features)
    oracle = by_scikit_learn(4.0).fit(np.repeat(features, 3, axis=0), np.tile(range(3), 200), shares.ravel())
    (classifier,) = fit(data, shares, np.ones((1, 200), dtype=bool), [4.0])
    found = classifier.log_probs(data)[0].exp().numpy()
    np.testing.assert_allclose(found, oracle.predict_proba(features), atol=FITTED[torch.float64])


@pytest.mark.parametrize("d", [5, 40])
def test_constant_features_give_the_shares_of_the_classes(d):
    labels = np.repeat([0, 1, 1, 1], 5)
    for features in (torch.zeros(20, d), torch.ones(20, d)):
        *_, classifier = fit(features, one_hot(labels, 2), np.ones((1, 20), dtype=bool), (1.0, 256.0))
        np.testing.assert_allclose(classifier.log_probs(features)[0].exp(), [[0.25, 0.75]] * 20, atol=1e-3)


def test_separable_classes_and_a_class_that_a_training_set_lacks():
    features, labels = torch.eye(3).repeat(10, 1), np.tile([0, 1, 2], 10)
    rows = np.stack([np.ones(30, dtype=bool), labels < 2])
    *_, classifiers = fit(features, one_hot(labels, 3), rows, (1.0, 256.0))
    probs = classifiers.log_probs(features).exp().numpy()
    assert (probs[0].argmax(axis=1) == labels).all()
    assert (probs[1].argmax(axis=1) == labels)[labels < 2].all()
    assert probs[1][labels < 2, 2].max() < 0.01


@pytest.mark.parametrize("classes", [2, 3])
def test_nested_cross_validation_agrees_with_scikit_learn(classes):
    features, labels, _ = problem(240, 12, classes, seed=3)
    shuffled = StratifiedKFold(4, shuffle=True, random_state=7)
    wanted = cross_val_score(search(4, seed=7), features, labels, cv=shuffled)
    result = nested_cross_validation(features, labels, grid=GRID, folds=4, seed=7)
    np.testing.assert_allclose(result.folds, wanted)
    assert result.accuracy == pytest.approx(wanted.mean())
    assert accuracy(one_hot(result.predictions, classes), labels) == pytest.approx(wanted.mean(), abs=0.01)
    assert len(set(result.C)) > 1  # so the choice of C matters in this test


def test_cross_validated_agrees_with_scikit_learn():
    features, labels, _ = problem(240, 12, 3, seed=4)
    oracle = search(5).fit(features[:200], labels[:200])
    chosen = cross_validated(features[:200], labels[:200], grid=GRID, folds=5)
    assert oracle.best_params_ == {"C": chosen.C}
    assert chosen.score == pytest.approx(oracle.best_score_)
    found = chosen.log_probs(features[200:]).argmax(axis=1)
    assert (found == oracle.predict(features[200:])).all()


def test_the_test_labels_of_a_fold_do_not_influence_its_predictions(monkeypatch):
    """A fit of all rows, which this test has to notice, is put in the place of the right one."""
    features, labels, _ = problem(100, 40, 2)
    tests, right = split(labels, 5, 0), module.fit

    def changed():
        before = nested_cross_validation(features, labels, grid=GRID, folds=5, tests=tests).predictions
        for test in tests:
            other = np.where(test, 1 - labels, labels)
            after = nested_cross_validation(features, other, grid=GRID, folds=5, tests=tests).predictions
            yield (after != before)[test].sum()

    assert sum(changed()) == 0
    monkeypatch.setattr(module, "fit", lambda x, y, rows, grid: right(x, y, np.ones_like(rows), grid))
    assert sum(changed()) > 50


def test_among_equal_scores_the_smallest_c_is_chosen():
    features, labels = np.repeat([[-1.0], [1.0]], 20, axis=0), np.repeat([0, 1], 20)
    assert set(nested_cross_validation(features, labels, grid=GRID, folds=4).C) == {GRID[0]}
    assert {cross_validated(features, labels, grid=GRID, folds=4).C} == {GRID[0]}
    chosen = held_out_validated(features, one_hot(labels, 2), features, lambda p: 1.0, grid=GRID)
    assert {chosen.C} == {GRID[0]}


def test_held_out_rows_choose_c_and_are_not_trained_on():
    features, labels, _ = problem(240, 12, 2)
    scores = []

    def score(log_probs):
        scores.append(accuracy(log_probs, labels[200:]))
        return scores[-1]

    chosen = held_out_validated(features[:200], one_hot(labels[:200], 2), features[200:], score, grid=GRID)
    fitted = [by_scikit_learn(C, 1e-8).fit(features[:200], labels[:200]) for C in GRID]
    wanted = [each.score(features[200:], labels[200:]) for each in fitted]
    assert scores == pytest.approx(wanted)
    assert {chosen.C} == {GRID[int(np.argmax(wanted))]}
    assert chosen.score == max(wanted)


def test_limited_data_improves_with_size_and_ends_at_the_full_classifier():
    features, labels, _ = problem(600, 15, 2)
    sets = features[:400], labels[:400], features[400:], labels[400:]
    curve = limited_data(*sets, [20, 400], repeats=4, grid=GRID, folds=4)
    assert curve[20].shape == (4,)
    assert curve[400].mean() > curve[20].mean() + 0.05
    assert len(set(curve[20])) > 1
    whole = cross_validated(*sets[:2], grid=GRID, folds=4, seed=0)
    assert curve[400][0] == accuracy(whole.log_probs(sets[2]), sets[3])
    with pytest.raises(ValueError, match="sizes: want at least two examples of each class, not so with 3"):
        limited_data(*sets, [3])


def test_few_shots_separate_a_class_from_random_sentences_and_are_not_tested():
    generator = np.random.default_rng(0)
    others = generator.standard_normal((80, 10))
    far, alike = generator.standard_normal((50, 10)) + 2, generator.standard_normal((50, 10))
    results = few_shot(far, others, 5, repeats=6)
    assert len(results) == 6
    assert min(result.accuracy for result in results) > 0.65
    assert abs(np.mean([result.accuracy for result in few_shot(alike, others, 5)]) - 0.5) < 0.12
    assert results == few_shot(far, others, 5, repeats=6) != few_shot(far, others, 5, repeats=6, seed=1)
    # A mean of one-hot rows has no information about others, so only a drawn row would be recognised.
    rows = np.eye(40)
    losses = [result.loss for result in few_shot(rows[:20], rows[20:], 5)]
    assert losses == pytest.approx([math.log(2)] * 10)
    for shots in (0, 3, 9):
        with pytest.raises(ValueError, match="shots: want at least 1 and fewer than 3 positives"):
            few_shot(np.ones((3, 2)), np.ones((9, 2)), shots)
