"""Classifiers without training: the means of vectors as their weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp


class MeanClassifier(NamedTuple):
    """How well class means classify."""

    accuracy: float
    loss: float  # mean over the test rows of logsumexp(W x) − (W x)_label: CURL's supervised loss


def mean_classifier(
    features: NDArray[np.floating],  # (n, d)
    labels: NDArray[np.int64],  # (n,)
    test_features: NDArray[np.floating],  # (m, d)
    test_labels: NDArray[np.int64],  # (m,)
) -> MeanClassifier:
    """Judges the linear classifier whose weights are the classes' mean vectors. (Arora et al. 2019, L_sup^μ.)

    Args:
        features, labels: rows whose means are taken; classes numbered from 0, each with a row.
        test_features, test_labels: rows that are classified.
    """
    data = np.asarray(features, dtype=np.float64)
    weights = np.stack([data[labels == number].mean(axis=0) for number in range(labels.max() + 1)])
    return _judge(weights, test_features, test_labels)


def few_shot(
    positives: NDArray[np.floating],  # (n, d)
    others: NDArray[np.floating],  # (m, d)
    shots: int,
    *,
    repeats: int = 10,
    seed: int = 0,
) -> list[MeanClassifier]:
    """Tells sentences of a class from random ones, by the mean of a few of each.

    Args:
        positives: the class's vectors; those not drawn are tested.
        others: vectors of random sentences; as many are drawn, and as many tested as positives, if there are.
        shots: how many of each make a mean.
        repeats: draws, each with a result.
        seed: of the draws.
    """
    if not 1 <= shots < min(len(positives), len(others)):
        raise ValueError(
            f"shots: wanted at least 1 and fewer than {len(positives)} positives and {len(others)} others, "
            f"got {shots}"
        )
    generator = np.random.default_rng(seed)
    results = []
    for _ in range(repeats):
        own, random = (
            generator.permutation(np.asarray(rows, dtype=np.float64)) for rows in (positives, others)
        )
        tested = min(len(own), len(random)) - shots
        weights = np.stack([random[:shots].mean(axis=0), own[:shots].mean(axis=0)])
        test = np.concatenate([random[shots:][:tested], own[shots:][:tested]])
        results.append(_judge(weights, test, np.repeat([0, 1], tested)))
    return results


def _judge(
    weights: NDArray[np.float64], features: NDArray[np.floating], labels: NDArray[np.int64]
) -> MeanClassifier:
    scores = np.asarray(features, dtype=np.float64) @ weights.T
    losses = logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]
    return MeanClassifier(float((scores.argmax(axis=1) == labels).mean()), float(losses.mean()))
