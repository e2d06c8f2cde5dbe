"""The look-up of words in published word vectors, most of which know lower-case words alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.sentences.text.vectors.files import read_vectors


class WordRows:
    """Finds a word's row: that of the word itself, or else that of its lower-case form.

    Of a word that occurs twice, the first row counts.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._rows: dict[str, int] = {}
        for row, word in enumerate(words):
            self._rows.setdefault(word, row)

    def find(self, word: str) -> int:
        """The row of a word, -1 if it has none."""
        row = self._rows.get(word)
        return self._rows.get(word.lower(), -1) if row is None else row


class Found(NamedTuple):
    """The vectors of those words that have one."""

    places: NDArray[np.int64]  # (n,), ascending: which of the words they are
    vectors: NDArray[np.float32]  # (n, d)


def vectors_of(path: str | Path, words: Sequence[str]) -> Found:
    """Looks words up in a file, as of `read_vectors`. Memory holds the vectors of these words alone.

    A word takes the vector of the word itself, or else that of its lower-case form.
    """
    names, vectors, _ = read_vectors(path, {*words, *(word.lower() for word in words)})
    find = WordRows(names).find
    rows = np.fromiter(map(find, words), dtype=np.int64, count=len(words))
    places = np.flatnonzero(rows >= 0)
    return Found(places, vectors[rows[places]])
