"""Encoders that a trained one has to beat: averages of word vectors, and random weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import sparse
from sklearn.utils.extmath import randomized_svd

from fastqt.errors import InputError
from fastqt.model import SentenceEncoder
from fastqt.text.reader import open_text

# Letters with ' or - within, digits, and any other sign by itself.
TOKEN = re.compile(r"[^\W\d_]+(?:['-][^\W\d_]+)*|\d+|[^\w\s]|_")


def tokens(text: str) -> list[str]:
    """A sentence's words and signs, lower-cased."""
    return TOKEN.findall(text.lower().replace("’", "'"))


class WordVectors:
    """The mean of a sentence's word vectors; of no known word, zeros.

    Args:
        words: in lower case.
        vectors: (len(words), d).
        weights: (len(words),) of the words in the mean, whose divisor stays the number of known words;
            equal ones if not given.
    """

    def __init__(
        self,
        words: Sequence[str],
        vectors: NDArray[np.floating],
        weights: NDArray[np.floating] | None = None,
    ) -> None:
        if vectors.ndim != 2 or len(vectors) != len(words):
            raise ValueError(f"vectors: wanted ({len(words)}, d) for {len(words)} words, got {vectors.shape}")
        self.row = {word: row for row, word in enumerate(words)}
        self.vectors = np.asarray(vectors, dtype=np.float32)
        if weights is not None:
            self.vectors = self.vectors * np.asarray(weights, dtype=np.float32)[:, None]

    @classmethod
    def load(cls, path: str | Path) -> WordVectors:
        """Reads an .npz with `words` and `vectors`, or text, "word v1 … vd" a line, .gz or .xz too."""
        words, vectors, _ = read_vectors(path)
        return cls(words, vectors)

    def __call__(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, d) for n sentences."""
        rows = [[self.row[token] for token in tokens(text) if token in self.row] for text in texts]
        sizes = np.array([len(row) for row in rows])
        columns = np.fromiter((word for row in rows for word in row), dtype=np.int64, count=sizes.sum())
        shares = np.repeat(1 / np.maximum(sizes, 1), sizes).astype(np.float32)
        starts = np.concatenate([[0], np.cumsum(sizes)])
        matrix = sparse.csr_matrix((shares, columns, starts), shape=(len(texts), len(self.vectors)))
        return np.asarray(matrix @ self.vectors)


class SIF(WordVectors):
    """Means weighted by smooth inverse frequency, a / (a + p(word)). (Arora, Liang & Ma 2017.)

    The second step of the method, `remove_component`, needs a set of sentences: `encode` applies it to those
    given, and `fastqt.evaluation.evaluate` to each task's. A call returns the weighted means alone.

    Args:
        words, vectors: as of `WordVectors`.
        counts: how often each word occurs in a corpus; one that does not occur has weight 1.
        total: words of that corpus; the sum of `counts` if not given.
        a: the smoothing.
    """

    def __init__(
        self,
        words: Sequence[str],
        vectors: NDArray[np.floating],
        counts: NDArray[np.integer],
        *,
        total: int | None = None,
        a: float = 1e-3,
    ) -> None:
        share = np.asarray(counts, dtype=np.float64) / (counts.sum() if total is None else total)
        super().__init__(words, vectors, a / (a + share))
        self.per_task = remove_component

    @classmethod
    def load(cls, path: str | Path, counts: str | Path | None = None, *, a: float = 1e-3) -> SIF:
        """Reads vectors as `WordVectors.load`, and counts of their .npz or of a file "word count" a line."""
        words, vectors, own = read_vectors(path)
        if counts is None:
            if own is None:
                raise InputError(f"{path} holds no `counts`: name a file of word counts too")
            return cls(words, vectors, own, a=a)
        number = _read_counts(counts)
        numbers = np.array([number.get(word, 0) for word in words])
        return cls(words, vectors, numbers, total=sum(number.values()), a=a)

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """(n, d) for n sentences, less their first principal component."""
        return remove_component(self(texts))


def remove_component(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Rows (n, d) less their projection on the first right singular vector of the matrix, not centred."""
    vectors = np.asarray(vectors, dtype=np.float32)
    _, _, (first,) = randomized_svd(vectors, n_components=1, n_iter=7, random_state=0)
    return vectors - np.outer(vectors @ first, first).astype(np.float32)


def random_encoder(directory: str | Path, *, seed: int = 0, device: str = "auto") -> SentenceEncoder:
    """The model of a training run's settings and vocabulary as it was before training, with another seed.

    Args:
        directory: what `fastqt train` wrote; its weights are not read.
        seed: of the weights.
        device: where to compute.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SentenceEncoder.load(directory, device, trained=False)


def read_vectors(
    path: str | Path,
) -> tuple[list[str], NDArray[np.float32], NDArray[np.int64] | None]:
    """Words, their vectors, and their counts where the file has them; see `WordVectors.load`."""
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


def _read_counts(path: str | Path) -> dict[str, int]:
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
