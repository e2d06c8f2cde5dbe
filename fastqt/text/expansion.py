"""Vocabulary expansion: vectors for words that a model was not trained on, mapped from pre-trained ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from fastqt.text.vocabulary import Vocabulary


class AffineMap(NamedTuple):
    """x to x @ matrix + intercept."""

    matrix: NDArray[np.float64]  # (W, D)
    intercept: NDArray[np.float64]  # (D,)

    def __call__(self, x: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(x, dtype=np.float64) @ self.matrix + self.intercept


def fit_affine(sources: NDArray[np.floating], targets: NDArray[np.floating]) -> AffineMap:
    """The affine map of least squared error, in float64.

    Args:
        sources: (n, W), n > W.
        targets: (n, D).

    Raises:
        ValueError: shapes that do not fit, or too few rows to determine the map.
    """
    if sources.ndim != 2 or targets.ndim != 2 or len(sources) != len(targets):
        raise ValueError(f"targets: wanted (n, D) for sources (n, W) {sources.shape}, got {targets.shape}")
    n, W = sources.shape
    if n <= W:
        raise ValueError(f"sources: wanted more rows than the {W} columns, to determine the map, got {n}")
    x, y = sources.astype(np.float64), targets.astype(np.float64)
    x_mean, y_mean = x.mean(0), y.mean(0)
    matrix = np.linalg.lstsq(x - x_mean, y - y_mean, rcond=None)[0]
    return AffineMap(matrix, y_mean - x_mean @ matrix)


def expand_table(
    table: NDArray[np.floating], vectors: NDArray[np.floating], rows: NDArray[np.integer]
) -> NDArray[np.floating]:
    """A trained table with a row for each further word that has a pre-trained vector.

    The map is fitted on the words that have both; trained rows stay what they are.

    Args:
        table: (V, D) the trained vectors.
        vectors: (P, W) the pre-trained ones.
        rows: (P,) the row of `table` that is of the same word, or -1.

    Returns:
        (V + n, D) of the table's dtype: the table, then the mapped vectors of the n words without a row, in
        their order.

    Raises:
        ValueError: as `fit_affine`.

    Source: Kiros et al., "Skip-thought vectors" (arXiv:1506.06726), section 2.2.
    """
    shared = rows >= 0
    mapped = fit_affine(vectors[shared], table[rows[shared]])(vectors[~shared])
    return np.concatenate([table, mapped.astype(table.dtype)])


def expand_vocabulary(vocabulary: Vocabulary, words: Sequence[str]) -> Vocabulary:
    """The vocabulary with new words after its own, in their order."""
    state = json.loads(vocabulary.tokenizer.to_str())
    ids = state["model"]["vocab"]
    ids.update({word: number for number, word in enumerate(words, start=len(ids))})
    return Vocabulary(
        Tokenizer.from_str(json.dumps(state)), unknown=vocabulary.unknown, max_length=vocabulary.max_length
    )
