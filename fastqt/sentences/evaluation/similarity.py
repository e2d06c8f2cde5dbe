"""Semantic similarity of pairs: correlation with human scores, relatedness, alignment, uniformity."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fastqt.errors import InputError
from fastqt.sentences import metrics
from fastqt.sentences.evaluation.classification import held_out_validated, pair_features
from fastqt.sentences.evaluation.data import read_pairs
from fastqt.sentences.options.commands import PAPER_GRID

DECIMALS = 6
POSITIVE_SCORE = 4.0  # pairs with a higher gold score are the positives of alignment


class Correlation(NamedTuple):
    """Correlation coefficients with the gold scores; NaN where `why_undefined` has a reason."""

    pearson: float
    spearman: float


def cosines(u: NDArray[np.floating], v: NDArray[np.floating]) -> NDArray[np.float64]:
    """The cosine of each pair of rows, (n,), rounded to six decimals; 0 for a pair with a row of zeros."""
    # The digits after the sixth are rounding errors of float32 vectors. They would give equal cosines
    # different ranks.
    return np.asarray((_unit(u) * _unit(v)).sum(axis=1).round(DECIMALS))


def correlate(scores: NDArray[np.floating], gold: NDArray[np.floating]) -> Correlation:
    """Pearson's and Spearman's correlation coefficients of scores and gold scores, (n,) each."""
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
    """The correlations of a task that consists of subsets, (n,) by name, and their three aggregates."""
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
    """Turns scores (n,) into distributions (n, classes) over 1 … `classes` with the scores as their means.

    Class ⌊y⌋ has the probability 1 − (y − ⌊y⌋), and the next class has the rest.

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
    Each part has vectors u (n, d) and v (n, d) of its pairs, and scores (n,) in [1, classes]. The C is that
    with the highest Pearson coefficient on `dev`.

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


class DevelopmentPairs:
    """Pairs of sentences with a gold score of their similarity, such as STS-B's dev.tsv.

    The file has tab-separated columns: genre, score from 0 to 5, first and second sentence. It may be
    compressed as .xz or .gz.
    """

    def __init__(self, path: str | Path) -> None:
        self.pairs = read_pairs(Path(path), gold=1, first=2)
        gold = self.pairs.gold
        if len(gold) < 2 or np.ptp(gold) == 0:
            raise InputError(
                f"{path}: want pairs of different scores, with which cosines have a correlation; got "
                f"{len(gold):,} of {gold[0]:g}"
            )

    def evaluate(self, encode: Callable[[list[str]], NDArray[np.float32]]) -> dict[str, float]:
        """Evaluates a function from n sentences to vectors (n, d) on the pairs.

        dev_spearman is Spearman's coefficient of the cosines and the gold scores, and NaN where all cosines
        are equal; dev_alignment is that of the pairs with a high score, if there are any, and dev_uniformity
        that of all sentences.
        """
        vectors = encode(self.pairs.first + self.pairs.second)
        u, v = np.split(vectors, 2)
        positive = self.pairs.gold > POSITIVE_SCORE
        return {
            "dev_spearman": correlate(cosines(u, v), self.pairs.gold).spearman,
            **({"dev_alignment": alignment(u[positive], v[positive])} if positive.any() else {}),
            "dev_uniformity": uniformity(vectors),
        }
