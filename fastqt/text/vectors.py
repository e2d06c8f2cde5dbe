"""Reads word vectors and word counts from files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.json_text import one_line
from fastqt.text.limits import table_lines
from fastqt.text.npz import Wanted, read_npz

SURROGATES = (0xD800, 0xE000)
LARGEST_COUNT = np.iinfo(np.int64).max


def read_vectors(
    path: str | Path,
) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64] | None]:
    """Reads word vectors.

    Args:
        path: an .npz file with the arrays `words`, `vectors` and optionally `counts`; or a text file with
            lines "word v1 … vd", which may be compressed as .gz or .xz.

    Returns:
        words: V words.
        vectors: (V, d) float32, finite.
        counts: (V,) int64, the frequency of each word; None if the file has no counts.

    Raises:
        InputError: the file is missing, damaged, larger than memory or of another format.
    """
    if str(path).endswith(".npz"):
        return _read_npz(path)
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    for number, line in enumerate(table_lines(path), start=1):
        word, *values = line.split(" ")
        try:
            row = np.array(values, dtype=np.float32)
        except ValueError as error:
            raise InputError(f"{path}: line {number}: want a word and numbers: {one_line(error)}") from None
        if not values or len(row) != len(rows[0] if rows else row):
            raise InputError(
                f"{path}: want a word and equally many numbers a line: line {number} has {len(row)}"
            )
        words.append(word)
        rows.append(row)
    return words, _finite(np.stack(rows), path), None


def _read_npz(path: str | Path) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64] | None]:
    arrays = read_npz(
        path,
        {"words": Wanted("U", 1), "vectors": Wanted("fiu", 2), "counts": Wanted("iu", 1, optional=True)},
    )
    # numpy makes a text of any numbers; Python then ends with an error of its own, or has half a character.
    codes = arrays["words"].view(f"{arrays['words'].dtype.str[0]}u4")
    if ((codes > sys.maxunicode) | ((codes >= SURROGATES[0]) & (codes < SURROGATES[1]))).any():
        raise InputError(f"{path}: words: want Unicode texts, got numbers that are no characters")
    words = arrays["words"].tolist()
    if len(vectors := arrays["vectors"]) != len(words):
        raise InputError(f"{path}: vectors: want {len(words)} rows for as many words, got {len(vectors)}")
    with np.errstate(over="ignore"):
        vectors = _finite(vectors.astype(np.float32), path)
    if (counts := arrays.get("counts")) is not None:
        if len(counts) != len(words):
            raise InputError(f"{path}: counts: want {len(words)} for as many words, got {len(counts)}")
        if len(counts) and not 0 <= counts.min() <= counts.max() <= LARGEST_COUNT:
            raise InputError(f"{path}: counts: want none below 0 or above {LARGEST_COUNT}")
        counts = counts.astype(np.int64)
    return words, vectors, counts


def _finite(vectors: NDArray[np.float32], path: str | Path) -> NDArray[np.float32]:
    if not np.isfinite(vectors).all():
        row = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
        raise InputError(f"{path}: vectors: want finite numbers, got NaN or infinity in row {row + 1}")
    return vectors


def read_counts(path: str | Path) -> dict[str, int]:
    """Reads the frequency of words from a text file with lines "word count".

    Raises:
        InputError: the file is missing, damaged or of another format, or a count is negative or too large.
    """
    counts: dict[str, int] = {}
    for number, line in enumerate(table_lines(path), start=1):
        try:
            word, text = line.split(" ")
            count = int(text)
        except ValueError as error:
            raise InputError(
                f"{path}: want a word and a whole number a line: line {number}: {one_line(error)}"
            ) from None
        if not 0 <= count <= LARGEST_COUNT:
            raise InputError(f"{path}: line {number}: want a count from 0 to {LARGEST_COUNT}, got {count}")
        counts[word] = count
    if sum(counts.values()) > LARGEST_COUNT:
        raise InputError(f"{path}: want counts whose sum is at most {LARGEST_COUNT}")
    return counts
