"""SupCon and NT-Xent from their definitions, with all scores, in numpy float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    """The losses of rows, and the gradients of sum_i weights_i loss_i."""

    rows: np.ndarray  # (N,)
    embeddings: np.ndarray  # (N, D), of the queries' side alone
    candidates: np.ndarray  # (M, D)
    scale: float


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def through_unit(x: np.ndarray, gradient: np.ndarray) -> np.ndarray:
    """The gradient of x from the one of unit(x)."""
    u = unit(x)
    return (gradient - (gradient * u).sum(1, keepdims=True) * u) / np.linalg.norm(x, axis=1, keepdims=True)


def answer(
    loss: str,
    x: np.ndarray,
    labels: np.ndarray,
    y: np.ndarray,
    candidate_labels: np.ndarray,
    itself: bool,
    scale: float,
    normalize: bool,
    weights: np.ndarray,
) -> Answer:
    """Losses and gradients; `itself`: cell (i, i) is row i itself, and no candidate.

    The gradients are sums over one row's candidates after the other, as the definitions have them.
    """
    queries, candidates = (unit(x), unit(y)) if normalize else (x, y)
    products = queries @ candidates.T
    rows, of_scores = np.zeros(len(x)), np.zeros_like(products)
    for i in range(len(x)):
        others = [j for j in range(len(y)) if not (itself and i == j)]
        positives = [j for j in others if labels[i] == candidate_labels[j]]
        negatives = [j for j in others if labels[i] != candidate_labels[j]]
        for p in positives:
            # Everything that the positive competes with, but not itself, which would hide small odds.
            rivals = [a for a in others if a != p] if loss == "supcon" else negatives
            share = 1 / len(positives) if loss == "supcon" else 1.0
            leads = scale * (products[i, rivals] - products[i, p])
            lead = np.logaddexp.reduce(leads)
            loss_of_pair = np.logaddexp(0, lead)
            rows[i] += share * loss_of_pair
            of_scores[i, rivals] += weights[i] * share * np.exp(leads - loss_of_pair)
            of_scores[i, p] -= weights[i] * share * np.exp(lead - loss_of_pair)
    of_products = scale * of_scores
    of_queries, of_candidates = of_products @ candidates, of_products.T @ queries
    if normalize:
        of_queries, of_candidates = through_unit(x, of_queries), through_unit(y, of_candidates)
    return Answer(rows, of_queries, of_candidates, float((of_scores * products).sum()))


def mean_weights(loss: str, labels: np.ndarray, candidate_labels: np.ndarray, itself: bool) -> np.ndarray:
    """What the mean multiplies each row's loss by."""
    positives = (labels[:, None] == candidate_labels).sum(1) - itself
    terms = (positives > 0).sum() if loss == "supcon" else positives.sum()
    return np.full(len(labels), 1 / max(terms, 1))
