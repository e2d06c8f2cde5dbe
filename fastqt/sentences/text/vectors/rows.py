"""What the readers of word vectors have in common."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError


class WordVectorRows(NamedTuple):
    """Words and their vectors."""

    words: list[str]  # n
    vectors: NDArray[np.float32]  # (n, d), finite
    counts: NDArray[np.int64] | None  # (n,), the frequency of each word, if the file has it


def finite(vectors: NDArray[np.float32], path: str | Path) -> NDArray[np.float32]:
    """The vectors, if all of their numbers are finite."""
    if not np.isfinite(vectors).all():
        row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise InputError(f"{path}: vectors: want finite numbers, got NaN or infinity in row {row + 1}")
    return vectors
