"""The development pairs on which a training is evaluated while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastqt.sentences.evaluation.data import read_pairs
from fastqt.sentences.evaluation.similarity import alignment, correlate, cosines, uniformity
from fastqt.sentences.evaluation.tasks import POSITIVE_SCORE


class DevelopmentPairs:
    """Pairs of sentences with a gold score of their similarity, such as STS-B's dev.tsv.

    Args:
        path: tab-separated columns: genre, score from 0 to 5, first and second sentence. The file may be
            compressed as .xz or .gz.

    Raises:
        InputError: the file cannot be read or has other columns.
    """

    def __init__(self, path: str | Path) -> None:
        self.pairs = read_pairs(Path(path), gold=1, first=2)

    def evaluate(self, encode: Callable[[list[str]], NDArray[np.float32]]) -> dict[str, float]:
        """Evaluates an encoder on the pairs.

        Args:
            encode: maps a list of n sentences to vectors (n, d).

        Returns:
            dev_spearman: Spearman's coefficient of the cosines and the gold scores; dev_alignment: of the
            pairs with a high score; dev_uniformity: of all sentences.
        """
        vectors = encode(self.pairs.first + self.pairs.second)
        u, v = np.split(vectors, 2)
        positive = self.pairs.gold > POSITIVE_SCORE
        return {
            "dev_spearman": correlate(cosines(u, v), self.pairs.gold).spearman,
            "dev_alignment": alignment(u[positive], v[positive]),
            "dev_uniformity": uniformity(vectors),
        }
