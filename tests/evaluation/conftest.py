"""What the tests of evaluation share."""

import numpy as np
import pytest


@pytest.fixture
def problem():
    """Makes examples to classify."""
    return make_problem


def make_problem(n, d, classes, seed=0):
    """Features of unequal spread about a common mean, as averages of words have, and noisy classes."""
    generator = np.random.default_rng(seed)
    features = generator.standard_normal((n, d)) * np.exp(-3 * np.arange(d) / d) + generator.standard_normal(
        d
    )
    scores = 3 * (features - features.mean(axis=0)) @ generator.standard_normal((d, classes)) / np.sqrt(d)
    labels = (scores + generator.gumbel(size=scores.shape)).argmax(axis=1)
    rows = generator.random((3, n)) < 0.8
    return features, labels, rows
