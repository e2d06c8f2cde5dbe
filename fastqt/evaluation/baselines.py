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
from fastqt.runs.model import SentenceEncoder
from fastqt.text.vectors import read_counts, read_vectors

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
        number = read_counts(counts)
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
