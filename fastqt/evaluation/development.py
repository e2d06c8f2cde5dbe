"""Sentence pairs that a training is judged by while it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastqt.evaluation.data import read_pairs
from fastqt.evaluation.similarity import alignment, correlate, cosines, uniformity
from fastqt.evaluation.tasks import ALIGNED


class DevelopmentPairs:
    """Pairs with a gold score of their similarity, as STS-B's dev.tsv has them.

    Args:
        path: tab-separated: genre, score from 0 to 5, two sentences; `.xz` and `.gz` too.

    Raises:
        InputError: the file cannot be read, or has other columns.
    """

    def __init__(self, path: str | Path) -> None:
        self.pairs = read_pairs(Path(path), gold=1, first=2)

    def judge(self, encode: Callable[[list[str]], NDArray[np.float32]]) -> dict[str, float]:
        """Spearman's coefficient of the cosines with the gold scores, and alignment and uniformity.

        Args:
            encode: sentences to vectors (n, d).
        """
        vectors = encode(self.pairs.first + self.pairs.second)
        u, v = np.split(vectors, 2)
        positive = self.pairs.gold > ALIGNED
        return {
            "dev_spearman": correlate(cosines(u, v), self.pairs.gold).spearman,
            "dev_alignment": alignment(u[positive], v[positive]),
            "dev_uniformity": uniformity(vectors),
        }
