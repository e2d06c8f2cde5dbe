"""Classifiers whose weights are class means, compared with their formulas."""

import math

import numpy as np
import pytest

from fastqt.sentences.evaluation import few_shot, mean_classifier
from tests.shared.tolerances import FLOAT64


def test_a_mean_classifier_by_hand():
    features = np.array([[1.0, 0], [3, 0], [0, 2], [0, 4], [-1, -1]])
    labels = np.array([0, 0, 1, 1, 2])
    test, wanted = np.array([[1.0, 0.5], [1, 2], [-3, -2]]), np.array([0, 0, 2])
    means = [(2, 0), (0, 3), (-1, -1)]
    losses, right = [], 0
    for row, label in zip(test, wanted, strict=True):
        scores = [row[0] * a + row[1] * b for a, b in means]
        losses.append(math.log(sum(math.exp(score - scores[label]) for score in scores)))
        right += scores[label] == max(scores)
    found = mean_classifier(features, labels, test, wanted)
    assert found.accuracy == right / 3 == 2 / 3
    assert found.loss == pytest.approx(sum(losses) / 3, rel=FLOAT64)


def test_the_loss_of_two_classes_is_the_softplus_of_their_score_difference():
    generator = np.random.default_rng(0)
    positive, negative, x = generator.standard_normal((3, 10, 4))
    found = mean_classifier(
        np.concatenate([negative, positive]), np.repeat([0, 1], 10), x, np.ones(10, dtype=np.int64)
    )
    scores = x @ (positive.mean(axis=0) - negative.mean(axis=0))
    assert found.loss == pytest.approx(np.log1p(np.exp(-scores)).mean(), rel=FLOAT64)
    assert found.accuracy == (scores > 0).mean()


def test_few_shots_separate_a_class_from_random_sentences():
    generator = np.random.default_rng(0)
    others = generator.standard_normal((80, 10))
    far, alike = generator.standard_normal((50, 10)) + 2, generator.standard_normal((50, 10))
    results = few_shot(far, others, 5, repeats=6)
    assert len(results) == 6
    assert min(result.accuracy for result in results) > 0.65
    assert abs(np.mean([result.accuracy for result in few_shot(alike, others, 5)]) - 0.5) < 0.12
    assert results == few_shot(far, others, 5, repeats=6)
    assert results != few_shot(far, others, 5, repeats=6, seed=1)


def test_the_drawn_sentences_are_not_tested():
    # All rows are one-hot. A mean of some rows has no information about the others, so only a drawn row would
    # be recognised.
    rows = np.eye(40)
    results = few_shot(rows[:20], rows[20:], 5)
    assert [result.loss for result in results] == pytest.approx([math.log(2)] * 10)


def test_a_wrong_number_of_shots_is_refused():
    for shots in (0, 3, 9):
        with pytest.raises(ValueError, match="shots: want at least 1 and fewer than 3 positives"):
            few_shot(np.ones((3, 2)), np.ones((9, 2)), shots)
