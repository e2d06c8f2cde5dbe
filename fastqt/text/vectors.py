"""Reads word vectors and word counts from files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError
from fastqt.text.reader import open_text


def read_vectors(
    path: str | Path,
) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64] | None]:
    """Reads word vectors.

    Args:
        path: an .npz file with the arrays `words`, `vectors` and optionally `counts`; or a text file with
            lines "word v1 … vd", which may be compressed as .gz or .xz.

    Returns:
        words: V words.
        vectors: (V, d) float32.
        counts: (V,) int64, the frequency of each word; None if the file has no counts.

    Raises:
        InputError: the file is missing, damaged or of another format.
    """
    if str(path).endswith(".npz"):
        return _read_npz(path)
    rows = _split_lines(path)
    try:
        vectors = np.array([row[1:] for row in rows], dtype=np.float32)
    except ValueError as error:
        raise InputError(f"{path}: wanted a word and equally many numbers a line: {error}") from None
    return [row[0] for row in rows], vectors, None


def _read_npz(path: str | Path) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64] | None]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            words, vectors = arrays["words"].tolist(), arrays["vectors"].astype(np.float32)
            counts = arrays["counts"].astype(np.int64) if "counts" in arrays else None
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (KeyError, ValueError, OSError) as error:
        raise InputError(f"{path} is not an .npz with `words` and `vectors`: {error}") from error
    return words, vectors, counts


def read_counts(path: str | Path) -> dict[str, int]:
    """Reads the frequency of words from a text file with lines "word count".

    Raises:
        InputError: the file is missing, damaged or of another format.
    """
    try:
        return {word: int(count) for word, count in _split_lines(path)}
    except ValueError as error:
        raise InputError(f"{path}: wanted a word and a whole number a line: {error}") from None


def _split_lines(path: str | Path) -> list[list[str]]:
    with open_text(str(path)) as file:
        try:
            return [line.split(" ") for line in file.read().decode().rstrip("\n").split("\n")]
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8: {error}") from None
