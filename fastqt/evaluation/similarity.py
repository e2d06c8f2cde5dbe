"""Scores of pairs: correlations with human judgement, relatedness, alignment and uniformity."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fastqt import metrics
from fastqt.evaluation.classification import PAPER_GRID, held_out_validated, pair_features

DECIMALS = 6


class Correlation(NamedTuple):
    """With the judges' scores; 0 where either side is constant."""

    pearson: float
    spearman: float


def cosines(
    u: NDArray[np.floating],  # (n, d)
    v: NDArray[np.floating],  # (n, d)
) -> NDArray[np.float64]:
    """Cosine of each pair of rows, (n,), to six decimals; 0 with a row of zeros."""
    # Beyond the sixth is the noise of float32 vectors, and would rank what is equal.
    return np.asarray((_unit(u) * _unit(v)).sum(axis=1).round(DECIMALS))


def correlate(scores: NDArray[np.floating], gold: NDArray[np.floating]) -> Correlation:
    """Pearson's and Spearman's coefficient."""
    if np.ptp(scores) == 0 or np.ptp(gold) == 0:
        return Correlation(0.0, 0.0)
    return Correlation(float(stats.pearsonr(scores, gold)[0]), float(stats.spearmanr(scores, gold)[0]))


class SubsetCorrelations(NamedTuple):
    """Of one year's task: of each subset, and put together in three ways."""

    subsets: dict[str, Correlation]
    pairs: dict[str, int]  # in each subset
    all: Correlation  # of all pairs as one set
    mean: Correlation  # over the subsets
    wmean: Correlation  # over the subsets, weighted by their pairs


def correlate_subsets(
    scores: NDArray[np.floating], gold: NDArray[np.floating], subset: NDArray[np.str_]
) -> SubsetCorrelations:
    """Correlations of the subsets of a semantic textual similarity task, and their three aggregates."""
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
    """Scores y in [1, classes] as distributions (n, classes) over 1..classes with mean y.

    The share 1 − (y − ⌊y⌋) is that of class ⌊y⌋, the rest that of the next. (Tai et al. 2015, section 4.2.)
    """
    y = np.asarray(scores, dtype=np.float64)
    if not ((y >= 1) & (y <= classes)).all():
        raise ValueError(f"scores: wanted them from 1 to {classes}, got {y.min()} to {y.max()}")
    return np.asarray(np.maximum(0, 1 - np.abs(np.arange(1, classes + 1) - y[:, None])))


class Relatedness(NamedTuple):
    """Of predicted with judged relatedness."""

    pearson: float
    spearman: float
    mse: float
    C: float
    dev_pearson: float
    predictions: NDArray[np.float64]


def relatedness(
    train: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]],
    dev: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]],
    test: tuple[NDArray[np.floating], NDArray[np.floating], NDArray[np.floating]],
    *,
    grid: Sequence[float] = PAPER_GRID,
    classes: int = 5,
) -> Relatedness:
    """Predicts the relatedness of pairs: p·[1..classes] with p learnt from distributions (`floor_split`).

    Args:
        train, dev, test: vectors u (n, d) and v (n, d) of the pairs, and scores (n,) in [1, classes].
        grid: values of C; that with the highest Pearson coefficient on dev is taken.
        classes: the highest score.
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


def alignment(
    u: NDArray[np.floating],  # (n, d)
    v: NDArray[np.floating],  # (n, d)
) -> float:
    """E ‖x − y‖² over pairs of positives, vectors scaled to norm 1. (Wang & Isola 2020.)"""
    return float(((_unit(u) - _unit(v)) ** 2).sum(axis=1).mean())


def uniformity(
    vectors: NDArray[np.floating],  # (n, d)
    t: float = 2.0,
) -> float:
    """log E exp(−t ‖x − y‖²) over pairs of different rows, scaled to norm 1. (Wang & Isola 2020.)"""
    return metrics.uniformity(torch.from_numpy(_unit(vectors)), t)


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.float64]:
    vectors = np.asarray(vectors, dtype=np.float64)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)
