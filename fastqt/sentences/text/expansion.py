"""Vocabulary expansion: maps pre-trained word vectors to words that a model was not trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fastqt.sentences.text.vocabulary import Vocabulary


class AffineMap(NamedTuple):
    """The function x @ matrix + intercept of rows x."""

    matrix: NDArray[np.float64]  # (W, D)
    intercept: NDArray[np.float64]  # (D,)

    def __call__(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(x, dtype=np.float64) @ self.matrix + self.intercept


def fit_affine(sources: NDArray[np.floating], targets: NDArray[np.floating]) -> AffineMap:
    """Fits an affine map from (n, W) to (n, D) by least squares, in float64.

    ValueError where the shapes do not fit together, or n <= W rows do not determine the map.
    """
    if sources.ndim != 2 or targets.ndim != 2 or len(sources) != len(targets):
        raise ValueError(f"targets: want (n, D) for sources (n, W) {sources.shape}, got {targets.shape}")
    n, W = sources.shape
    if n <= W:
        raise ValueError(f"sources: want more rows than the {W} columns, to determine the map, got {n}")
    x, y = sources.astype(np.float64), targets.astype(np.float64)
    x_mean, y_mean = x.mean(0), y.mean(0)
    matrix = np.linalg.lstsq(x - x_mean, y - y_mean, rcond=None)[0]
    return AffineMap(matrix, y_mean - x_mean @ matrix)


def expand_table(
    table: NDArray[np.floating],  # (V, D) trained vectors
    vectors: NDArray[np.floating],  # (P, W) pre-trained vectors
    rows: NDArray[np.integer],  # (P,), the row of `table` that belongs to the same word, or -1 for a new word
) -> NDArray[np.floating]:
    """Appends a row to a trained table for each new word that has a pre-trained vector.

    The map from pre-trained to trained vectors is fitted, as by `fit_affine`, on the words that have both.
    The trained rows do not change. The rows of the n new words, (V + n, D) in the dtype of the table, are in
    their order.

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726), section 2.2.
    """
    shared = rows >= 0
    mapped = fit_affine(vectors[shared], table[rows[shared]])(vectors[~shared])
    return np.concatenate([table, mapped.astype(table.dtype)])


def expand_vocabulary(vocabulary: Vocabulary, words: Sequence[str]) -> Vocabulary:
    """A copy of the vocabulary with `words`, none of which it contains, appended in their order."""
    state = json.loads(vocabulary.tokenizer.to_str())
    ids = state["model"]["vocab"]
    ids.update({word: number for number, word in enumerate(words, start=len(ids))})
    return Vocabulary(
        Tokenizer.from_str(json.dumps(state)), unknown=vocabulary.unknown, max_length=vocabulary.max_length
    )
