"""Fixtures for the tests of evaluation."""

import numpy as np
import pytest


@pytest.fixture
def problem():
    """A function that makes examples to classify."""
    return make_problem


def make_problem(n, d, classes, seed=0):
    """Random features with a common mean and unequal variances, like averages of word vectors; noisy classes.

    Returns:
        Features (n, d), class numbers (n,), and three random training sets (3, n) bool.
    """
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((n, d)) * np.exp(-3 * np.arange(d) / d) + generator.standard_normal(
        d
    )
    scores = 3 * (features - features.mean(axis=0)) @ generator.standard_normal((d, classes)) / np.sqrt(d)
    labels = (scores + generator.gumbel(size=scores.shape)).argmax(axis=1)
    rows = generator.random((3, n)) < 0.8
    return features, labels, rows
