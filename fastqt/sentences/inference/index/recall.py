"""Compares what an index finds with an exact search, and chooses how much effort searches make."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fastqt.sentences.inference.best import Best
from fastqt.sentences.inference.index.index import RECALL_AT, Index, Recall
from fastqt.sentences.inference.index.spool import Spool

QUERIES = 1000
ROWS = 4096  # of vectors that queries are compared with at a time
TIE = 1e-5  # cosines that differ by less are equal: each search rounds in an order of its own


@dataclass(frozen=True)
class Questions:
    """Sentences of the corpus that look for their nearest neighbours among the others."""

    rows: NDArray[np.int64]  # (Q,)
    vectors: NDArray[np.float32]  # (Q, D)
    cosines: NDArray[np.float32]  # (Q, m) of the exact nearest neighbours, best first


def sample(vectors: Spool, seed: int) -> Questions:
    """A thousand rows, or all if there are fewer, and the cosines of their nearest neighbours."""
    rows = np.random.default_rng([seed, 1]).choice(vectors.rows, min(QUERIES, vectors.rows), replace=False)
    rows.sort()
    queries = vectors.take(rows)
    best, first = Best(len(rows), min(RECALL_AT, vectors.rows - 1)), 0
    for part in vectors.parts(ROWS):
        scores = queries @ part.T
        inside = (first <= rows) & (rows < first + len(part))
        scores[inside, rows[inside] - first] = -np.inf
        if best.k:
            best.add(torch.from_numpy(scores), first)
        first += len(part)
    return Questions(rows, queries, best.scores.numpy())


def measure(index: Index, questions: Questions, effort: int) -> Recall:
    """The recall of searches with some effort."""
    queries, at = questions.cosines.shape
    if not at:
        return Recall(1.0, at, queries)
    cosines, rows = index.search_vectors(questions.vectors, at + 1, effort)
    cosines[rows == questions.rows[:, None]] = -np.inf
    hits = (cosines >= questions.cosines[:, -1:] - TIE).sum(axis=1)
    return Recall(float(np.minimum(hits, at).mean() / at), at, queries)


def sufficient_effort(index: Index, questions: Questions, min_recall: float) -> int:
    """The least effort, as far as recall grows with it, that reaches a recall, or else all effort."""
    effort, most = index.searcher.least_effort, index.searcher.most_effort
    below = effort - 1
    while effort < most and measure(index, questions, effort).value < min_recall:
        below, effort = effort, min(2 * effort, most)
    while effort - below > 1:
        middle = (below + effort) // 2
        if measure(index, questions, middle).value < min_recall:
            below = middle
        else:
            effort = middle
    return effort
