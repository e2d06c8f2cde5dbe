"""Vectors that users bring: of words, as text with their counts, and of rows, as .npy files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastqt.errors import InputError, one_line
from fastqt.sentences.text.reader import check_rereadable, table_lines

LARGEST_COUNT = np.iinfo(np.int64).max
HEADER_NUMBER = re.compile("[0-9]{1,18}")


class WordVectorRows(NamedTuple):
    """Words and their vectors."""

    words: list[str]  # n
    vectors: NDArray[np.float32]  # (n, d), finite


def read_vectors(path: str | Path, wanted: Collection[str] | None = None) -> WordVectorRows:
    """Reads word vectors: n words, in the order of the file, with vectors (n, d), finite float32.

    The file is text with lines "word v1 … vd", as of GloVe, which may begin with a line of the number of
    words and d, as of word2vec and fastText, and may be compressed as .gz or .xz. A word may hold blanks, and
    lines may end with them. Vectors of words other than the wanted ones are not kept; by default all are.
    """
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
    return WordVectorRows(words, vectors)


def width_of(path: str | Path) -> int:
    """The number of dimensions of the word vectors in a file, as of `read_vectors`, of which little is read.

    What can be read only once is refused.
    """
    check_rereadable("vectors", [str(path)])
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
    names, vectors = read_vectors(path, {*words, *(word.lower() for word in words)})
    find = WordRows(names).find
    rows = np.fromiter(map(find, words), dtype=np.int64, count=len(words))
    places = np.flatnonzero(rows >= 0)
    return Found(places, vectors[rows[places]])


def map_rows(path: str | Path) -> NDArray[np.floating[Any]]:
    """Maps the rows (n, d) of an .npy file of a floating-point type, of which nothing is executed."""
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or one_line(error)}") from error
    # numpy's parser of headers raises whatever Python's own parser and tokenizer do.
    except Exception as error:
        raise InputError(f"{path} is no .npy, or is damaged: {one_line(error)}") from error
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.dtype.kind != "f" or 0 in rows.shape:
        got = f"shape {rows.shape!s:.100} of {rows.dtype!s:.100}" if hasattr(rows, "dtype") else "an .npz"
        raise InputError(f"{path}: want rows (n, d) of a floating-point type in an .npy, got {got}")
    return rows
