"""Word vectors as text and as .npz, and word counts."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from itertools import chain, takewhile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError, one_line
from fastqt.sentences.text.limits import table_lines
from fastqt.sentences.text.npz import Wanted, npz_header, read_npz
from fastqt.sentences.text.vectors.rows import WordVectorRows, finite

SURROGATES = (0xD800, 0xE000)
LARGEST_COUNT = np.iinfo(np.int64).max
HEADER_NUMBER = re.compile("[0-9]{1,18}")
ARRAYS = {"words": Wanted("U", 1), "vectors": Wanted("fiu", 2), "counts": Wanted("iu", 1, optional=True)}


def read_text_vectors(path: str | Path, wanted: Collection[str] | None) -> WordVectorRows:
    """Reads text with a word and numbers on each line, as `read_vectors` says."""
    words: list[str] = []
    rows: list[NDArray[np.float32]] = []
    width = 0
    for number, word, row in _words_and_vectors(path):
        width = len(row)
        if not np.isfinite(row).all():
            raise InputError(f"{path}: vectors: want finite numbers, got NaN or infinity in line {number}")
        if wanted is None or word in wanted:
            words.append(word)
            rows.append(row)
    vectors = np.stack(rows) if rows else np.zeros((0, width), dtype=np.float32)
    return WordVectorRows(words, vectors, None)


def width_of_text(path: str | Path) -> int:
    """The number of numbers on the first line of a text that has a word."""
    _, _, row = next(_words_and_vectors(path))
    return len(row)


def _words_and_vectors(path: str | Path) -> Iterator[tuple[int, str, NDArray[np.float32]]]:
    """The lines of a text: the number of each, its word, in which blanks may be, and its vector.

    A header, as word2vec and fastText write it, is no word. Without one, the first line says the width.
    """
    lines = enumerate(map(_columns, table_lines(path)), start=1)
    first, second = next(lines), next(lines, None)
    width = _width_in_header(first[1], second)
    before = [first, second] if not width else [second]

    for number, columns in (each for each in chain(before, lines) if each is not None):
        width = width or _numbers_at_end(columns)
        begin = len(columns) - width
        if not width or begin < 1 or (begin > 1 and _is_number(columns[begin - 1])):
            raise InputError(
                f"{path}: want a word and equally many numbers a line: line {number} has "
                f"{_numbers_at_end(columns)}"
            )
        try:
            vector = np.array(columns[begin:], dtype=np.float32)
        except ValueError as error:
            raise InputError(f"{path}: line {number}: want a word and numbers: {one_line(error)}") from None
        yield number, " ".join(columns[:begin]), vector


def _columns(line: str) -> list[str]:
    """What blanks or tabs separate in a line; there may be some at its end."""
    return line.replace("\t", " ").rstrip(" ").split(" ")


def _width_in_header(columns: list[str], second: tuple[int, list[str]] | None) -> int:
    """The width in a header, which says how many words there are and how wide; 0 if a first line is none."""
    if second is None or len(columns) != 2 or not all(HEADER_NUMBER.fullmatch(each) for each in columns):
        return 0
    width = int(columns[1])
    return width if len(second[1]) > width else 0


def _numbers_at_end(columns: list[str]) -> int:
    """How many numbers a line ends with, behind what is a word at least."""
    return sum(1 for _ in takewhile(_is_number, columns[:0:-1]))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def width_of_npz(path: str | Path) -> int:
    """The width of the vectors of an .npz, from their header."""
    shape, _, _ = npz_header(path, "vectors", ARRAYS["vectors"])
    return shape[1]


def read_npz_vectors(path: str | Path, wanted: Collection[str] | None) -> WordVectorRows:
    """Reads what `fastqt.sentences.text.vectors.read_vectors` says from an .npz file."""
    words, vectors, counts = _read_npz(path)
    if wanted is not None:
        kept = [row for row, word in enumerate(words) if word in wanted]
        words, vectors = [words[row] for row in kept], vectors[kept]
        counts = None if counts is None else counts[kept]
    return WordVectorRows(words, vectors, counts)


def _read_npz(path: str | Path) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64] | None]:
    arrays = read_npz(path, ARRAYS)
    # numpy makes a text of any numbers; Python then ends with an error of its own, or has half a character.
    codes = arrays["words"].view(f"{arrays['words'].dtype.str[0]}u4")
    if ((codes > sys.maxunicode) | ((codes >= SURROGATES[0]) & (codes < SURROGATES[1]))).any():
        raise InputError(f"{path}: words: want Unicode texts, got numbers that are no characters")
    words = arrays["words"].tolist()
    if len(vectors := arrays["vectors"]) != len(words):
        raise InputError(f"{path}: vectors: want {len(words)} rows for as many words, got {len(vectors)}")
    with np.errstate(over="ignore"):
        vectors = finite(vectors.astype(np.float32), path)
    if (counts := arrays.get("counts")) is not None:
        if len(counts) != len(words):
            raise InputError(f"{path}: counts: want {len(words)} for as many words, got {len(counts)}")
        if len(counts) and not 0 <= counts.min() <= counts.max() <= LARGEST_COUNT:
            raise InputError(f"{path}: counts: want none below 0 or above {LARGEST_COUNT}")
        counts = counts.astype(np.int64)
    return words, vectors, counts


def read_counts(path: str | Path) -> dict[str, int]:
    """Reads the frequency of words from a text file with lines "word count"."""
    counts: dict[str, int] = {}
    for number, line in enumerate(table_lines(path), start=1):
        try:
            word, text = _columns(line)
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
