"""Cross-validation agrees with scikit-learn and never trains on its test rows; ensembles; limited data."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score

from fastqt.sentences.evaluation import classification as module
from fastqt.sentences.evaluation import (
    cross_validated,
    ensemble,
    held_out_validated,
    limited_data,
    nested_cross_validation,
    pair_features,
)
from fastqt.sentences.evaluation.classification import accuracy, split
from fastqt.sentences.evaluation.logistic import one_hot

GRID = (0.25, 4.0, 64.0)


def search(folds, seed=0):
    """scikit-learn's search for C, the oracle."""
    shuffled = StratifiedKFold(folds, shuffle=True, random_state=seed)
    return GridSearchCV(LogisticRegression(solver="newton-cholesky", tol=1e-8), {"C": GRID}, cv=shuffled)


@pytest.mark.parametrize("classes", [2, 3])
def test_nested_cross_validation_agrees_with_scikit_learn(classes, problem):
    features, labels, _ = problem(240, 12, classes, seed=3)
    shuffled = StratifiedKFold(4, shuffle=True, random_state=7)
    wanted = cross_val_score(search(4, seed=7), features, labels, cv=shuffled)
    result = nested_cross_validation(features, labels, grid=GRID, folds=4, seed=7)
    np.testing.assert_allclose(result.folds, wanted)
    assert result.accuracy == pytest.approx(wanted.mean())
    assert accuracy(one_hot(result.predictions, classes), labels) == pytest.approx(wanted.mean(), abs=0.01)
    assert len(set(result.C)) > 1  # so the choice of C matters in this test


def test_cross_validated_agrees_with_scikit_learn(problem):
    features, labels, _ = problem(240, 12, 3, seed=4)
    oracle = search(5).fit(features[:200], labels[:200])
    chosen = cross_validated(features[:200], labels[:200], grid=GRID, folds=5)
    assert oracle.best_params_ == {"C": chosen.C}
    assert chosen.score == pytest.approx(oracle.best_score_)
    found = chosen.log_probs(features[200:]).argmax(axis=1)
    assert (found == oracle.predict(features[200:])).all()


def changes_by_test_labels(features, labels):
    """The number of test predictions, over all folds, that change when the fold's test labels change."""
    tests = split(labels, 5, 0)
    before = nested_cross_validation(features, labels, grid=GRID, folds=5, tests=tests).predictions
    changed = 0
    for test in tests:
        other = np.where(test, 1 - labels, labels)
        after = nested_cross_validation(features, other, grid=GRID, folds=5, tests=tests).predictions
        changed += (after != before)[test].sum()
    return changed


def leaking_fit(features, targets, rows, grid):
    return fit_before_the_leak(features, targets, np.ones_like(rows), grid)


fit_before_the_leak = module.fit


def test_the_test_labels_of_a_fold_do_not_influence_its_predictions(monkeypatch, problem):
    features, labels, _ = problem(100, 40, 2)
    assert changes_by_test_labels(features, labels) == 0
    monkeypatch.setattr(module, "fit", leaking_fit)
    assert changes_by_test_labels(features, labels) > 50


def test_random_labels_give_chance_accuracy(monkeypatch):
    generator = np.random.default_rng(0)
    features, labels = generator.standard_normal((240, 80)), generator.permutation(np.repeat([0, 1], 120))
    accuracy = nested_cross_validation(features, labels, grid=GRID, folds=5).accuracy
    assert abs(accuracy - 0.5) < 3.5 * 0.5 / np.sqrt(240)
    monkeypatch.setattr(module, "fit", leaking_fit)
    assert nested_cross_validation(features, labels, grid=GRID, folds=5).accuracy > 0.7


def test_among_equal_scores_the_smallest_c_is_chosen():
    features, labels = np.repeat([[-1.0], [1.0]], 20, axis=0), np.repeat([0, 1], 20)
    assert set(nested_cross_validation(features, labels, grid=GRID, folds=4).C) == {GRID[0]}
    assert {cross_validated(features, labels, grid=GRID, folds=4).C} == {GRID[0]}
    chosen = held_out_validated(features, one_hot(labels, 2), features, lambda p: 1.0, grid=GRID)
    assert {chosen.C} == {GRID[0]}


def test_held_out_rows_choose_c_and_are_not_trained_on(problem):
    features, labels, _ = problem(240, 12, 2)
    scores = []

    def score(log_probs):
        scores.append(accuracy(log_probs, labels[200:]))
        return scores[-1]

    chosen = held_out_validated(features[:200], one_hot(labels[:200], 2), features[200:], score, grid=GRID)
    wanted = [
        LogisticRegression(C=C, solver="newton-cholesky", tol=1e-8)
        .fit(features[:200], labels[:200])
        .score(features[200:], labels[200:])
        for C in GRID
    ]
    assert scores == pytest.approx(wanted)
    assert {chosen.C} == {GRID[int(np.argmax(wanted))]}
    assert chosen.score == max(wanted)


def test_pair_features():
    u, v = np.array([[1.0, -2.0]]), np.array([[3.0, 5.0]])
    assert pair_features(u, v).tolist() == [[2, 7, 3, -10]]
    assert pair_features(v, u).tolist() == pair_features(u, v).tolist()


def test_an_ensemble_by_hand():
    first, second = np.log([[0.9, 0.1], [0.2, 0.8]]), np.log([[0.4, 0.6], [0.5, 0.5]])
    wanted = [
        [0.75 * np.log(0.9) + 0.25 * np.log(0.4), 0.75 * np.log(0.1) + 0.25 * np.log(0.6)],
        [0.75 * np.log(0.2) + 0.25 * np.log(0.5), 0.75 * np.log(0.8) + 0.25 * np.log(0.5)],
    ]
    np.testing.assert_allclose(ensemble([first, second], [90, 30]), wanted)
    for scores in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="scores: want "):
            ensemble([first, second], scores)


def test_limited_data_improves_with_size_and_ends_at_the_full_classifier(problem):
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
