"""Many logistic regressions at once, compared with those of scikit-learn one by one in float64."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from fastqt.sentences.evaluation.logistic import fit, one_hot
from tests.shared.tolerances import FITTED

GRID = (2.0**-2, 1.0, 16.0, 256.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "d", "classes"), [(400, 30, 2), (400, 20, 4), (60, 90, 2), (60, 90, 3)])
def test_probabilities_agree_with_scikit_learn(n, d, classes, dtype, problem):
    features, labels, rows = problem(n, d, classes)
    data = torch.from_numpy(features).to(dtype)
    for C, classifiers in zip(GRID, fit(data, one_hot(labels, classes), rows, GRID), strict=True):
        found = classifiers.log_probs(data).exp().double().numpy()
        for own, within in zip(found, rows, strict=True):
            oracle = LogisticRegression(C=C, solver="newton-cholesky", tol=1e-9)
            oracle.fit(features[within], labels[within])
            np.testing.assert_allclose(own, oracle.predict_proba(features), atol=FITTED[dtype])


def test_soft_targets_equal_weighted_copies_of_a_row(problem):
    features, _, _ = problem(200, 10, 3)
    shares = np.random.default_rng(1).dirichlet(np.ones(3), size=200)
    data = torch.from_numpy(features)
    oracle = LogisticRegression(C=4.0, solver="newton-cholesky", tol=1e-9)
    oracle.fit(np.repeat(features, 3, axis=0), np.tile(range(3), 200), shares.ravel())
    (classifier,) = fit(data, shares, np.ones((1, 200), dtype=bool), [4.0])
    found = classifier.log_probs(data)[0].exp().numpy()
    np.testing.assert_allclose(found, oracle.predict_proba(features), atol=FITTED[torch.float64])


@pytest.mark.parametrize("classes", [2, 3])
def test_the_gradient_of_the_objective_is_zero_at_the_solution(classes, problem):
    features, labels, rows = problem(300, 20, classes)
    data, C = torch.from_numpy(features), 8.0
    (classifiers,) = fit(data, one_hot(labels, classes), rows, [C])
    for weight, bias, within in zip(*classifiers, rows, strict=True):
        weight, bias = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        logits = data[within] @ weight + bias
        if classes == 2:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
        own = torch.from_numpy(labels[within])
        loss = C * torch.nn.functional.cross_entropy(logits, own, reduction="sum") + weight.square().sum() / 2
        for slope in torch.autograd.grad(loss, (weight, bias)):
            assert slope.abs().max() / (C * within.sum()) < FITTED[torch.float64]


def test_rows_outside_a_training_set_have_no_influence(problem):
    features, labels, rows = problem(200, 10, 2)
    data = torch.from_numpy(features)
    (before,) = fit(data, one_hot(labels, 2), rows, [256.0])
    for within, *wanted in zip(rows, *before, strict=True):
        changed = np.where(within, labels, 1 - labels)
        (after,) = fit(data, one_hot(changed, 2), within[None], [256.0])
        for was, now in zip(wanted, after, strict=True):
            np.testing.assert_allclose(now[0], was, atol=FITTED[torch.float64] * was.abs().max())


@pytest.mark.parametrize("d", [5, 40])
def test_constant_features_give_the_shares_of_the_classes(d):
    labels = np.repeat([0, 1, 1, 1], 5)
    for features in (torch.zeros(20, d), torch.ones(20, d)):
        *_, classifier = fit(features, one_hot(labels, 2), np.ones((1, 20), dtype=bool), GRID)
        np.testing.assert_allclose(classifier.log_probs(features)[0].exp(), [[0.25, 0.75]] * 20, atol=1e-3)


def test_separable_classes_and_a_class_that_a_training_set_lacks():
    features = torch.eye(3).repeat(10, 1)
    labels = np.tile([0, 1, 2], 10)
    rows = np.stack([np.ones(30, dtype=bool), labels < 2])
    *_, classifiers = fit(features, one_hot(labels, 3), rows, GRID)
    probs = classifiers.log_probs(features).exp().numpy()
    assert (probs[0].argmax(axis=1) == labels).all()
    assert (probs[1].argmax(axis=1) == labels)[labels < 2].all()
    assert probs[1][labels < 2, 2].max() < 0.01
