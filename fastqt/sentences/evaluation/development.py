"""The development pairs on which a training is evaluated while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.sentences.evaluation.data import read_pairs
from fastqt.sentences.evaluation.similarity import alignment, correlate, cosines, uniformity
from fastqt.sentences.evaluation.tasks import POSITIVE_SCORE


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
