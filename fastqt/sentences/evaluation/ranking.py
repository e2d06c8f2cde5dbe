"""Figures of rankings against judgements of relevance: means over all orders of equal scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

AT = 10  # documents that count for nDCG and MRR
DEPTH = 1000  # documents that count for MAP: as many as are ranked
RECALL_AT = (1, 10, 100)


def ranking_metrics(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """nDCG@10, MRR@10, MAP@1000 and recall@1, @10 and @100 of each query.

    A document is relevant if its relevance is at least 1. The relevance is its gain in nDCG, where
    documents that were not judged, or below 0, gain nothing. A relevant document that was not found counts as
    missed.

    Each figure is its mean over all orders of the documents with equal scores. Where no scores are equal, the
    figures are those of trec_eval, which takes one of these orders, by the documents' identifiers.

    Args:
        qrels: the relevance of judged documents, for each query: {query: {document: relevance}}.
        run: the scores of the documents that were found: {query: {document: score}}. Queries without
            judgements are left out.

    Returns:
        The figures of each query in `qrels`: {query: {figure: value}}. All are 0 for a query that has no
        relevant document, or for which nothing was found.

    Raises:
        ValueError: a score is NaN.

    Example:
        >>> from fastqt.sentences.evaluation import ranking_metrics
        >>> found = ranking_metrics({"q": {"a": 1, "b": 2}}, {"q": {"a": 0.9, "c": 0.8, "b": 0.1}})
        >>> {name: round(value, 3) for name, value in found["q"].items()}["nDCG@10"]
        0.76

    Source: trec_eval; Järvelin and Kekäläinen (2002) for nDCG, with the relevance as the gain.
    """
    figures = {}
    for query, judged in qrels.items():
        scores = run.get(query, {})
        if any(score != score for score in scores.values()):
            raise ValueError(f"run: want numbers as scores, got NaN for the query {query!r}")
        scored = [document for document in judged if document in scores]
        groups = groups_of(
            np.array(list(scores.values()), np.float64),
            np.array([scores[document] for document in scored], np.float64),
            np.array([judged[document] for document in scored], np.int64),
        )
        figures[query] = figures_of(groups, np.array(list(judged.values()), np.int64))
    return figures


class Groups(NamedTuple):
    """The documents that were found, in groups of equal scores, best first."""

    sizes: NDArray[np.int64]  # (g,) of documents
    relevant: NDArray[Any]  # (g,) how many of them are relevant
    gains: NDArray[Any]  # (g,) the sum of their gains


def groups_of(
    scores: NDArray[np.floating],  # (n,) of the documents that were found
    judged: NDArray[np.floating],  # (m,) the scores of those that were judged
    relevance: NDArray[np.int64],  # (m,)
    *,
    left_out: int = 0,
) -> Groups:
    """The groups of documents by their scores; `left_out` more documents have the lowest one.

    A judged document whose score is lower was not found.
    """
    levels, sizes = np.unique(-scores, return_counts=True)
    sizes[-1:] += left_out
    group = levels.searchsorted(-judged)
    kept = group < len(levels)
    relevant, gains = (
        np.bincount(group[kept], weights=weights[kept], minlength=len(levels))
        for weights in (relevance > 0, np.maximum(relevance, 0))
    )
    return Groups(sizes, relevant, gains)


def first_right(tied: int, right: int, places: int | None = None) -> NDArray[np.float64]:
    """The chances that the first right one of `tied` items is at place 1, 2, … of a random order.

    `right` of the items are right. That the first x are all wrong has the chance ∏ (wrong − j) / (tied − j)
    over j < x; the next one is then right with the chance right / (tied − x). All places where it can be are
    returned, tied − right + 1, or the first `places` of them.
    """
    x = np.arange(min(tied - right + 1, tied if places is None else places))
    missed = np.cumprod(np.concatenate([[1.0], (tied - right - x[:-1]) / (tied - x[:-1])]))
    return np.asarray(missed[: len(x)] * right / (tied - x))


def figures_of(
    groups: Groups,
    judged: NDArray[np.int64],  # (m,) the relevance of all documents that were judged
) -> dict[str, float]:
    """The figures of one query by their names: means over all orders within the groups."""
    wanted, ideal = int((judged > 0).sum()), _discounted(np.maximum(np.sort(judged)[::-1], 0))
    if not wanted:
        return dict.fromkeys(
            (f"nDCG@{AT}", f"MRR@{AT}", f"MAP@{DEPTH}", *map("recall@{}".format, RECALL_AT)), 0.0
        )

    # For each rank: the size n of its group, the place j in it from 0, and of the relevant documents how many
    # are in the group, m, and before it.
    ends = groups.sizes.cumsum()
    ranks = np.arange(1, min(groups.sizes.sum(), DEPTH) + 1)
    group = ends.searchsorted(ranks)
    n, m = groups.sizes[group], groups.relevant[group]
    j = ranks - 1 - (ends - groups.sizes)[group]
    before = (groups.relevant.cumsum() - groups.relevant)[group]

    # A rank holds a relevant document with the chance m / n, and gains as much as the group does on average.
    # Where it does, the other m - 1 are among the j earlier ranks of the group with the chance j / (n - 1).
    relevant = m / n
    precision = (before + 1 + (m - 1) * j / np.maximum(n - 1, 1)) / ranks

    return {
        f"nDCG@{AT}": _discounted((groups.gains / groups.sizes)[group]) / ideal,
        f"MRR@{AT}": _reciprocal_rank(groups),
        f"MAP@{DEPTH}": float((relevant * precision).sum()) / wanted,
        **{f"recall@{k}": float(relevant[:k].sum()) / wanted for k in RECALL_AT},
    }


def _reciprocal_rank(groups: Groups) -> float:
    """The mean of 1 / r, where r is the rank of the first relevant document, or of 0 where r is above 10."""
    first = int((groups.relevant > 0).argmax()) if groups.relevant.any() else None
    if first is None or (before := int(groups.sizes[:first].sum())) >= AT:
        return 0.0
    chances = first_right(int(groups.sizes[first]), int(groups.relevant[first]), AT - before)
    return float((chances / np.arange(before + 1, before + len(chances) + 1)).sum())


def _discounted(gains: NDArray[np.floating]) -> float:
    """The discounted cumulative gain of the first documents of a ranking."""
    gains = gains[:AT]
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())
