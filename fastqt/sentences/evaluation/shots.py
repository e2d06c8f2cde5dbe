"""Classifiers of a few sentences, whose weights are means of vectors."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fastqt.sentences.evaluation.classification import accuracy


class MeanClassifier(NamedTuple):
    """The results of a classifier whose weights are class means."""

    accuracy: float
    loss: float  # mean over the test rows of logsumexp(W x) − (W x)_label, CURL's supervised loss


def few_shot(
    positives: NDArray[np.floating],  # (n, d)
    others: NDArray[np.floating],  # (m, d)
    shots: int,
    *,
    repeats: int = 10,
    seed: int = 0,
) -> list[MeanClassifier]:
    """Classifies sentences as members of a class or as random sentences, by the means of a few of each.

    Args:
        positives: (n, d) vectors of the class.
        others: (m, d) vectors of random sentences.
        shots: number of vectors of each kind that are drawn for the means. Of the remaining vectors, equally
            many of each kind are tested.
        repeats: number of draws.
        seed: seed of the draws.

    Returns:
        One result for each draw.

    Raises:
        ValueError: `shots` is less than 1, or leaves no vector of a kind to test.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import few_shot
        >>> positives, others = np.tile([1.0, 0.0], (8, 1)), np.tile([0.0, 1.0], (8, 1))
        >>> [found.accuracy for found in few_shot(positives, others, shots=2, repeats=3)]
        [1.0, 1.0, 1.0]
    """
    if not 1 <= shots < min(len(positives), len(others)):
        raise ValueError(
            f"shots: want at least 1 and fewer than {len(positives)} positives and {len(others)} others, "
            f"got {shots}"
        )
    generator = np.random.default_rng(seed)
    results = []
    for _ in range(repeats):
        trained, random = (
            generator.permutation(np.asarray(rows, dtype=np.float64)) for rows in (positives, others)
        )
        tested = min(len(trained), len(random)) - shots
        weights = np.stack([random[:shots].mean(axis=0), trained[:shots].mean(axis=0)])
        test = np.concatenate([random[shots:][:tested], trained[shots:][:tested]])
        results.append(_evaluate(weights, test, np.repeat([0, 1], tested)))
    return results


def _evaluate(
    weights: NDArray[np.float64], features: NDArray[np.floating], labels: NDArray[np.int64]
) -> MeanClassifier:
    scores = np.asarray(features, dtype=np.float64) @ weights.T
    losses = logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]
    return MeanClassifier(accuracy(scores, labels), float(losses.mean()))
