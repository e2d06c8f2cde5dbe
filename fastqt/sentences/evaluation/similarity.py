"""Semantic similarity of pairs: correlation with human scores, relatedness, alignment, uniformity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fastqt.sentences import metrics
from fastqt.sentences.evaluation.classification import held_out_validated, pair_features
from fastqt.sentences.options.evaluation import PAPER_GRID

DECIMALS = 6


class Correlation(NamedTuple):
    """Correlation coefficients with the gold scores; NaN where `why_undefined` has a reason."""

    pearson: float
    spearman: float


def cosines(u: NDArray[np.floating], v: NDArray[np.floating]) -> NDArray[np.float64]:
    """The cosine of each pair of rows, rounded to six decimals.

    Args:
        u, v: (n, d).

    Returns:
        (n,); 0 for a pair with a row of zeros.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import cosines
        >>> cosines(np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([[2.0, 0.0], [0.0, 3.0]])).tolist()
        [1.0, 0.707107]
    """
    # The digits after the sixth are rounding errors of float32 vectors. They would give equal cosines
    # different ranks.
    return np.asarray((_unit(u) * _unit(v)).sum(axis=1).round(DECIMALS))


def correlate(scores: NDArray[np.floating], gold: NDArray[np.floating]) -> Correlation:
    """Pearson's and Spearman's correlation coefficients.

    Args:
        scores: (n,) scores of the pairs.
        gold: (n,) gold scores.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import correlate
        >>> found = correlate(np.array([0.1, 0.5, 0.9]), np.array([1.0, 2.0, 5.0]))
        >>> round(found.pearson, 4), round(found.spearman, 4)
        (0.9608, 1.0)
    """
    if why_undefined(scores, gold):
        return Correlation(math.nan, math.nan)
    return Correlation(float(stats.pearsonr(scores, gold)[0]), float(stats.spearmanr(scores, gold)[0]))


def why_undefined(scores: NDArray[np.floating], gold: NDArray[np.floating]) -> str:
    """Why scores and gold scores, (n,) each, have no correlation, as a sentence; "" if they have one."""
    if len(gold) < 2:
        return f"A correlation wants at least 2 pairs; there {'is 1' if len(gold) else 'are 0'}."
    for name, values in (("gold scores", gold), ("scores that the vectors give", scores)):
        if np.ptp(values) == 0:
            return f"All {name} are {values[0]:g}, and a constant has no correlation."
    return ""


class SubsetCorrelations(NamedTuple):
    """The correlations of one STS task: for each subset, and aggregated in three ways."""

    subsets: dict[str, Correlation]
    pairs: dict[str, int]  # number of pairs in each subset
    all: Correlation  # of all pairs as one set
    mean: Correlation  # mean over the subsets
    wmean: Correlation  # mean over the subsets, weighted by their numbers of pairs


def correlate_subsets(
    scores: NDArray[np.floating], gold: NDArray[np.floating], subset: NDArray[np.str_]
) -> SubsetCorrelations:
    """The correlations of a task that consists of subsets, and their three aggregates.

    Args:
        scores, gold: as of `correlate`.
        subset: (n,) the name of each pair's subset.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import correlate_subsets
        >>> scores, gold = np.array([0.1, 0.5, 0.9, 0.2, 0.4]), np.array([1.0, 2.0, 5.0, 1.0, 3.0])
        >>> found = correlate_subsets(scores, gold, np.array(["news", "news", "news", "forum", "forum"]))
        >>> sorted(found.subsets)
        ['forum', 'news']
    """
    names = sorted(set(subset.tolist()))
    each = {name: correlate(scores[subset == name], gold[subset == name]) for name in names}
    pairs = {name: int((subset == name).sum()) for name in names}
    table, sizes = np.array(list(each.values())), np.array(list(pairs.values()))
    return SubsetCorrelations(
        each,
        pairs,
        correlate(scores, gold),
        Correlation(*table.mean(axis=0).tolist()),
        Correlation(*np.average(table, axis=0, weights=sizes).tolist()),
    )


def floor_split(scores: NDArray[np.floating], classes: int = 5) -> NDArray[np.float64]:
    """Turns scores into distributions over the classes 1 … `classes` that have the scores as their means.

    Class ⌊y⌋ has the probability 1 − (y − ⌊y⌋), and the next class has the rest.

    Args:
        scores: (n,) in [1, classes].
        classes: number of classes.

    Returns:
        (n, classes).

    Raises:
        ValueError: a score is outside [1, classes].

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import floor_split
        >>> floor_split(np.array([3.25, 5.0])).tolist()
        [[0.0, 0.0, 0.75, 0.25, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]

    Source: Tai et al. (2015), section 4.2.
    """
    y = np.asarray(scores, dtype=np.float64)
    if not ((y >= 1) & (y <= classes)).all():
        raise ValueError(f"scores: want them from 1 to {classes}, got {y.min()} to {y.max()}")
    return np.asarray(np.maximum(0, 1 - np.abs(np.arange(1, classes + 1) - y[:, None])))


class Relatedness(NamedTuple):
    """The results of predicting the relatedness of the test pairs."""

    pearson: float
    spearman: float
    mse: float  # mean squared error
    C: float
    dev_pearson: float
    predictions: NDArray[np.float64]  # (n,)


def relatedness(
    train: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]],
    dev: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]],
    test: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]],
    *,
    grid: Sequence[float] = PAPER_GRID,
    classes: int = 5,
) -> Relatedness:
    """Predicts the relatedness of pairs by a classifier over the scores 1 … `classes`.

    The classifier learns the distributions of `floor_split`; the prediction is the mean of its probabilities.

    Args:
        train: vectors u (n, d) and v (n, d) of the training pairs, and scores (n,) in [1, classes].
        dev: the same for the development pairs.
        test: the same for the test pairs.
        grid: values of C, ascending. The one with the highest Pearson coefficient on `dev` is chosen.
        classes: the highest score.

    Returns:
        The correlations, the error and the predictions on `test`, and the chosen C.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import relatedness
        >>> draw = np.random.default_rng(0)
        >>> def pairs(n):  # vectors of both sentences, and scores from 1 to 5
        ...     return draw.normal(size=(n, 4)), draw.normal(size=(n, 4)), draw.uniform(1, 5, n)
        >>> found = relatedness(pairs(40), pairs(20), pairs(20), grid=[1.0])
        >>> found.predictions.shape, -1 <= found.pearson <= 1
        ((20,), True)

    Source: Tai et al. (2015), section 4.2.
    """
    values = np.arange(1.0, classes + 1)
    chosen = held_out_validated(
        pair_features(*train[:2]),
        floor_split(train[2], classes),
        pair_features(*dev[:2]),
        lambda log_probs: correlate(np.exp(log_probs) @ values, dev[2]).pearson,
        grid=grid,
    )
    predicted = np.exp(chosen.log_probs(pair_features(*test[:2]))) @ values
    error = float(((predicted - test[2]) ** 2).mean())
    return Relatedness(*correlate(predicted, test[2]), error, chosen.C, chosen.score, predicted)


def alignment(u: NDArray[np.floating], v: NDArray[np.floating]) -> float:
    """The mean of ‖x − y‖² over positive pairs, with all vectors scaled to norm 1.

    Args:
        u, v: (n, d), the sides of the pairs.

    Returns:
        A number from 0 to 4; lower is better. NaN without a pair.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import alignment
        >>> alignment(np.array([[2.0, 0.0]]), np.array([[0.0, 3.0]]))  # at a right angle
        2.0

    Source: Wang and Isola (2020).
    """
    return float(((_unit(u) - _unit(v)) ** 2).sum(axis=1).mean()) if len(u) else math.nan


def uniformity(vectors: NDArray[np.floating], t: float = 2.0) -> float:
    """The logarithm of the mean of exp(−t ‖x − y‖²) over all pairs of different rows, scaled to norm 1.

    Args:
        vectors: (n, d).
        t: the factor in the exponent.

    Returns:
        A number up to 0; it is lower the more evenly the vectors lie on the sphere.

    Example:
        >>> import numpy as np
        >>> from fastqt.sentences.evaluation import uniformity
        >>> round(uniformity(np.array([[1.0, 0.0], [-1.0, 0.0]])), 4)  # -2 times 2 squared
        -8.0

    Source: Wang and Isola (2020).
    """
    return metrics.uniformity(torch.from_numpy(_unit(vectors)), t)


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    vectors = np.asarray(vectors, dtype=np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)
