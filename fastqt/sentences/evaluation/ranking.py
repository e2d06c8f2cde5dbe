"""Figures of rankings against judgements of relevance, as trec_eval computes them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

AT = 10  # documents that count for nDCG and MRR
DEPTH = 1000  # documents that count for MAP: as many as are ranked
RECALL_AT = (1, 10, 100)


def ranking_metrics(
    qrels: Mapping[str, Mapping[str, int]], run: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """nDCG@10, MRR@10, MAP@1000 and recall@1, @10 and @100 of each query, as trec_eval computes them.

    A document is relevant if its relevance is at least 1. The relevance is its gain in nDCG, where
    documents that were not judged, or below 0, gain nothing. A relevant document that was not found counts as
    missed. Among equal scores the document comes first whose identifier is the last in order of the alphabet,
    so that no order of the documents is better than another.

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
        documents = sorted(scores, reverse=True)
        documents.sort(key=scores.__getitem__, reverse=True)  # stable, also in reverse
        relevance = np.array([judged.get(document, 0) for document in documents[:DEPTH]], np.int64)
        figures[query] = figures_of(relevance, np.array(list(judged.values()), np.int64))
    return figures


def figures_of(
    ranking: NDArray[np.int64],  # (n,) the relevance of what was found, best first
    judged: NDArray[np.int64],  # (m,) the relevance of all documents that were judged
) -> dict[str, float]:
    """The figures of one query by their names."""
    relevant = ranking[:DEPTH] > 0
    wanted = int((judged > 0).sum())

    ideal = _gain(np.sort(judged)[::-1])
    first = int(relevant.argmax()) + 1 if relevant.any() else AT + 1
    precisions = relevant.cumsum() / np.arange(1, len(relevant) + 1)

    return {
        f"nDCG@{AT}": _gain(ranking) / ideal if wanted else 0.0,
        f"MRR@{AT}": 1 / first if first <= AT else 0.0,
        f"MAP@{DEPTH}": float(precisions[relevant].sum()) / wanted if wanted else 0.0,
        **{f"recall@{k}": float(relevant[:k].sum()) / wanted if wanted else 0.0 for k in RECALL_AT},
    }


def _gain(ranking: NDArray[np.int64]) -> float:
    """The discounted cumulative gain of the first documents of a ranking."""
    gains = np.maximum(ranking[:AT], 0)
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())
